"""vLLM's V2 model runner without a GPU: its Triton kernels run in Triton's interpreter. For vLLM's own Python only.

``prepare`` before vLLM is imported; where vLLM starts processes of its own, by a ``sitecustomize``: `in_every_process`.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any


def prepare() -> None:
    """Make vLLM believe in a Triton for CPUs, and choose the V2 runner."""
    os.environ["TRITON_INTERPRET"] = "1"
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "1"
    import numpy as np
    import triton.backends
    import triton.language as tl
    from triton.runtime import interpreter

    class Driver:
        @staticmethod
        def is_active() -> bool:
            return True

    triton.backends.backends["cpu"] = triton.backends.Backend(compiler=None, driver=Driver)
    plain = interpreter.InterpreterBuilder.binary_op

    def binary_op(self: Any, left: Any, right: Any, op: Any) -> Any:
        """The interpreter gives a comparison its operand's type; as a mask that is refused."""
        handle = plain(self, left, right, op)
        if handle.data.dtype == np.bool_:
            handle.dtype = tl.int1
        return handle

    interpreter.InterpreterBuilder.binary_op = binary_op


def schedule_asynchronously() -> None:
    """As on GPUs; vLLM's CPU platform switches it off."""
    from vllm.platforms.cpu import CpuPlatform

    check = CpuPlatform.check_and_update_config.__func__

    def checked(cls: type, vllm_config: Any) -> None:
        check(cls, vllm_config)
        vllm_config.scheduler_config.async_scheduling = True

    CpuPlatform.check_and_update_config = classmethod(checked)


def verify_adaptively() -> None:
    """Adaptive verification without the full CUDA graphs that vLLM's configuration asks for, at made-up costs."""
    from vllm.v1.worker.gpu import model_runner
    from vllm.v1.worker.gpu.spec_decode import adaptive_verification as adaptive

    from ssd.integrations.vllm_v2 import Speculator

    def create(**given: Any) -> Any:
        manager = adaptive.AdaptiveVerificationManager(
            given["req_states"], given["query_start_loc"], given["num_bonus_tokens"],
            max_total_logits=given["max_total_logits"],
        )  # fmt: skip
        manager.set_cost_curves([(1, 0.1), (64, 0.1)], [(1, 1.0), (256, 12.0)])
        return manager

    model_runner.maybe_create_adaptive_verification_manager = create
    model_runner.resolve_adaptive_cudagraph_mode = lambda mode, *args, **kwargs: mode
    adaptive._assign_draft_token_budget_compiled = adaptive._assign_draft_token_budget
    init = Speculator.__init__

    def made(self: Speculator, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        self.enable_adaptive_verification = True

    Speculator.__init__ = made  # type: ignore[method-assign]


def in_every_process(folder: Path) -> dict[str, str]:
    """Environment in which each Python is prepared, and finds the metadata that ``vllm serve`` looks for."""
    (folder / "sitecustomize.py").write_text("from benchmarks.vllm.interpreter import prepare\n\nprepare()\n")
    metadata = folder / "vllm-0.32.0.dist-info" / "METADATA"
    metadata.parent.mkdir(exist_ok=True)
    metadata.write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n")
    root = Path(__file__).resolve().parents[2]
    return {"PYTHONPATH": f"{folder}{os.pathsep}{root}"}
