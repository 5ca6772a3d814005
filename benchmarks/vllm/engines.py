"""Run a vLLM engine, and measure its drafter. Only the interpreter of vLLM's environment creates engines.

``python -m benchmarks.vllm.engines`` is the process that `client.VllmEngine` starts. With ``check v1|v2``, it checks
that SSD drafts inside the installed vLLM. ``make bench-vllm`` begins with this check, so that an unusable environment
is not marked as ready.

vLLM's V2 model runner runs without a GPU, because its Triton kernels run in Triton's interpreter. For this, `prepare`
must be called before vLLM is imported. In processes that vLLM starts itself, a ``sitecustomize`` module calls it, see
`in_every_process`.
"""

from __future__ import annotations

import inspect
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.child import ROOT, serve

_NGRAM = {"num_speculative_tokens": 5, "prompt_lookup_min": 2, "prompt_lookup_max": 5}

METHODS: dict[str, dict[str, dict[str, Any] | None]] = {
    "v1": {
        "none": None,
        "ngram": {"method": "ngram", **_NGRAM},
        "suffix": {"method": "suffix"},
        "ssd": {
            "method": "custom_class",
            "model": "ssd.integrations.vllm.SuffixProposer",
            "num_speculative_tokens": 16,
        },
    },
    "v2": {
        "none": None,
        "ngram": {"method": "ngram_gpu", **_NGRAM},
        "ssd": {"method": "ngram_gpu", "model": "ssd", "num_speculative_tokens": 5},
    },
}
"""The speculative configuration of each method, by model runner. "suffix" has vLLM's defaults (tree depth and draft
limit 24); the V2 runner does not support it."""

ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "HF_HUB_OFFLINE": "1",
    "VLLM_PLUGINS": "ssd",
}
"""Environment variables that are set before vLLM is imported: one process, no network, and no plugins except SSD's."""


@dataclass(slots=True)
class Drafting:
    """Counters of the drafter, updated at each call by vLLM. A row-step is one row in one verification step."""

    propose_us: list[float] = field(default_factory=list)
    """The microseconds of each call of the drafter."""
    num_row_steps: int = 0
    num_output_tokens: int = 0
    num_draft_tokens: int = 0
    """The number of verified draft tokens, with padding on V2, which pads every draft to the maximum length."""
    num_accepted_tokens: int = 0
    num_preemptions: int = 0


class Engine:
    """A vLLM engine in this process, with counters for its drafter."""

    def __init__(
        self,
        model: str,
        method: str,
        *,
        batch: int,
        max_model_len: int,
        dtype: str,
        runner: str = "v1",
        switches: Sequence[str] = (),
        options: Mapping[str, Any] | None = None,
    ) -> None:
        """Load the model with a drafting method of `METHODS`.

        ``switches`` may contain "async" (see `schedule_asynchronously`), "adaptive" (see `verify_adaptively`) and
        "process" (the engine core runs in another process). ``options`` are further arguments of ``vllm.LLM``; its
        "speculative_config" is merged into that of the method.
        """
        os.environ.update(ENVIRONMENT)
        os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"
        if runner == "v2":
            prepare()
        if "process" in switches:
            os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"
        from vllm import LLM

        if "async" in switches:
            schedule_asynchronously()
        if "adaptive" in switches:
            verify_adaptively()
        given = {"enforce_eager": True, "enable_prefix_caching": False, **(options or {})}
        if "kv_events_config" in given:
            from vllm.config import KVEventsConfig

            given["kv_events_config"] = KVEventsConfig(**given["kv_events_config"])
        speculative, more = METHODS[runner][method], given.pop("speculative_config", {})
        self._llm = LLM(
            model=model,
            dtype=dtype,
            max_model_len=max_model_len,
            max_num_seqs=batch,
            seed=0,
            speculative_config=None if speculative is None else {**speculative, **more},
            disable_log_stats=True,
            **given,
        )
        self.drafting = Drafting()
        self.drafter: Any = None
        self.learned: list[list[int]] = []
        core = getattr(self._llm.llm_engine.engine_core, "engine_core", None)
        if core is not None:
            self._count_preemptions(core.scheduler)
            its_runner = core.model_executor.driver_worker.worker.model_runner
            self.drafter = getattr(its_runner, "speculator" if runner == "v2" else "drafter", None)
        if self.drafter is not None:
            self._watch(self.drafter, runner)
        if getattr(self.drafter, "_core", None) is not None:
            self.drafter._core.cache.add_listener(
                lambda pieces: self.learned.extend(piece.tolist() for piece in pieces)
            )

    def complete(
        self, prompts: Sequence[Sequence[int]], max_tokens: int, sampling: Sequence[dict[str, Any]] = ()
    ) -> tuple[list[list[int]], float]:
        """Complete all prompts, up to the batch size at a time; return the outputs and the seconds.

        Decoding is greedy unless ``sampling`` contains other sampling parameters for a prompt.
        """
        asked = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        params = [_params(max_tokens, given) for given in sampling or [{}] * len(prompts)]
        start = time.perf_counter()
        outputs = self._llm.generate(asked, params, use_tqdm=False)
        seconds = time.perf_counter() - start
        return [list(output.outputs[0].token_ids) for output in outputs], seconds

    def abort(self, prompts: Sequence[Sequence[int]], num_steps: int) -> list[list[int]]:
        """Abort requests for the prompts after ``num_steps`` steps, and return the tokens that clients had received."""
        engine = self._llm.llm_engine
        said: dict[str, list[int]] = {}
        for number, prompt in enumerate(prompts):
            engine.add_request(f"abort-{number}", {"prompt_token_ids": list(prompt)}, _params(400, {}))
        for _ in range(num_steps):
            for output in engine.step():
                said[output.request_id] = list(output.outputs[0].token_ids)
        engine.abort_request([f"abort-{number}" for number in range(len(prompts))])
        return [said.get(f"abort-{number}", []) for number in range(len(prompts))]

    def counters(self) -> dict[str, Any]:
        """Return all counters so far, with those of SSD's proposer if it is used."""
        own = asdict(self.drafter.stats()) if hasattr(self.drafter, "stats") else {}
        return {**asdict(self.drafting), "proposer": own}

    def close(self) -> None:
        """Shut the engine down as vLLM does."""
        self._llm.llm_engine.engine_core.shutdown()

    def _count_preemptions(self, scheduler: Any) -> None:
        preempt = scheduler._preempt_request

        def counted(*args: Any, **kwargs: Any) -> Any:
            self.drafting.num_preemptions += 1
            return preempt(*args, **kwargs)

        scheduler._preempt_request = counted

    def _watch(self, drafter: Any, runner: str) -> None:
        propose, drafting = drafter.propose, self.drafting
        signature = inspect.signature(propose)

        def timed(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            drafts = propose(*args, **kwargs)
            if kwargs.get("dummy_run"):
                return drafts
            drafting.propose_us.append(round(1e6 * (time.perf_counter() - start), 1))
            if runner == "v1":
                sampled = signature.bind(*args, **kwargs).arguments["sampled_token_ids"]
                counts = [(len(new), len(draft)) for new, draft in zip(sampled, drafts, strict=True)]
            else:  # verified: the accepted ones and those rejected
                counts = [
                    (new, new - 1 + rejected) for new, rejected in zip(args[5].tolist(), args[6].tolist(), strict=True)
                ]
            for new, drafted in counts:
                if new > 0 or runner == "v1":
                    drafting.num_row_steps += new > 0
                    drafting.num_output_tokens += new
                    drafting.num_accepted_tokens += max(0, new - 1)
                    drafting.num_draft_tokens += drafted
            return drafts

        drafter.propose = timed


def _params(max_tokens: int, given: Mapping[str, Any]) -> Any:
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    said = {"temperature": 0.0, "max_tokens": max_tokens, "detokenize": "stop" in given, **given}
    if "regex" in said:
        said["structured_outputs"] = StructuredOutputsParams(regex=said.pop("regex"))
    return SamplingParams(**said)


_TEXTS = ("def main(argv):\n    parser = ", "import os\nimport sys\n\ndef walk(", "import os\nimport sys\n\ndef walk(")
_CHECKED_TOKENS = 48


def check(runner: str) -> str:
    """Check that SSD drafts inside vLLM: the same requests run twice, the second time in at most half the steps.

    Outputs must equal those of transformers' ``model.generate``. Returns a line that describes the result. Raises
    ValueError if a check fails.
    """
    from ssd.bundled import MODEL_PATH
    from ssd.integrations.vllm_hooks import V1_HOOKS, V2_HOOKS, missing_hooks
    from ssd.text.codec import TextCodec

    if runner == "v2":
        prepare()  # looking for what hooks need imports vLLM
    if lacks := missing_hooks(V1_HOOKS + V2_HOOKS):
        raise ValueError("; ".join(lacks))
    codec = TextCodec.load(str(MODEL_PATH))
    prompts = [codec.encode_prompt(text) for text in _TEXTS]
    engine = Engine(str(MODEL_PATH), "ssd", batch=2, dtype="float32", max_model_len=512, runner=runner)
    steps = []
    for _ in range(2):
        before = engine.drafting.num_row_steps
        outputs, _ = engine.complete(prompts, _CHECKED_TOKENS)
        steps.append(engine.drafting.num_row_steps - before)
    counters = engine.counters()["proposer"]
    engine.close()
    import torch  # late: it imports Triton, which is prepared for V2 before
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(MODEL_PATH, dtype=torch.float32)
    for prompt, output in zip(prompts, outputs, strict=True):
        plain = model.generate(torch.tensor([prompt]), max_new_tokens=_CHECKED_TOKENS, do_sample=False)
        if output != plain[0, len(prompt) :].tolist():
            raise ValueError("outputs are not those of model.generate")
    if counters["num_failures"] or steps[1] * 2 > steps[0]:
        raise ValueError(f"{counters['num_failures']} failures; verify steps {steps[0]}, then {steps[1]}")
    return f"vLLM {runner} drafts with ours: verify steps {steps[0]}, then {steps[1]}"


def prepare() -> None:
    """Select the V2 runner, and let vLLM use Triton's interpreter as if it were a Triton backend for CPUs."""
    os.environ["TRITON_INTERPRET"] = "1"
    os.environ["TORCHDYNAMO_DISABLE"] = "1"  # its compiler asks Triton's driver for a device
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
        """Correct the dtype of comparisons: the interpreter keeps the operand's dtype, which is rejected as a mask."""
        handle = plain(self, left, right, op)
        if handle.data.dtype == np.bool_:
            handle.dtype = tl.int1
        return handle

    interpreter.InterpreterBuilder.binary_op = binary_op


def schedule_asynchronously() -> None:
    """Enable asynchronous scheduling as on GPUs; vLLM's CPU platform would disable it."""
    from vllm.platforms.cpu import CpuPlatform

    check = CpuPlatform.check_and_update_config.__func__

    def checked(cls: type, vllm_config: Any) -> None:
        check(cls, vllm_config)
        vllm_config.scheduler_config.async_scheduling = True

    CpuPlatform.check_and_update_config = classmethod(checked)


def verify_adaptively() -> None:
    """Enable vLLM's adaptive verification, with made-up costs and without the full CUDA graphs that it requires."""
    from vllm.v1.worker.gpu import model_runner
    from vllm.v1.worker.gpu.spec_decode import adaptive_verification as adaptive

    from ssd.integrations.vllm_v2 import Speculator

    def create(**given: Any) -> Any:
        manager = adaptive.AdaptiveVerificationManager(
            given["req_states"],
            given["query_start_loc"],
            given["num_bonus_tokens"],
            max_total_logits=given["max_total_logits"],
        )
        manager.set_cost_curves([(1, 0.1), (64, 0.1)], [(1, 1.0), (256, 12.0)])
        return manager

    model_runner.maybe_create_adaptive_verification_manager = create
    model_runner.resolve_adaptive_cudagraph_mode = lambda mode, *args, **kwargs: mode
    init = Speculator.__init__

    def made(self: Speculator, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        self.enable_adaptive_verification = True

    Speculator.__init__ = made  # type: ignore[method-assign]


def in_every_process(folder: Path) -> dict[str, str]:
    """Return environment variables with which every Python process calls `prepare` and finds vLLM's metadata."""
    (folder / "sitecustomize.py").write_text("from benchmarks.vllm.engines import prepare\n\nprepare()\n")
    metadata = folder / "vllm-0.32.0.dist-info" / "METADATA"
    metadata.parent.mkdir(exist_ok=True)
    metadata.write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n")
    return {"PYTHONPATH": f"{folder}{os.pathsep}{ROOT}"}


if __name__ == "__main__":
    if sys.argv[1] == "check":
        print(check(sys.argv[2]))
        sys.exit(0)
    sys.exit(serve(Engine))
