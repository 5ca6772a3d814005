"""vLLM engines and the clock around their proposers. Engines are made by vLLM's own interpreter only."""

from __future__ import annotations

import inspect
import os
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

METHODS: dict[str, dict[str, Any] | None] = {
    "none": None,
    "ngram": {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_min": 2, "prompt_lookup_max": 5},
    "suffix": {"method": "suffix"},
    "ssd": {
        "method": "custom_class",
        "model": "ssd.integrations.vllm.SuffixProposer",
        "num_speculative_tokens": 16,
    },
}
"""Speculative configuration of each engine. "suffix" has vLLM's defaults: tree depth and draft limit 24."""

ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "HF_HUB_OFFLINE": "1",
    "VLLM_PLUGINS": "ssd",
}
"""Set before vLLM is imported: one process, no network, and of all plugins only ours."""


@dataclass(slots=True)
class Drafting:
    """What was drafted, counted where vLLM calls the proposer. A row-step is one row in one verify step."""

    propose_us: list[float] = field(default_factory=list)
    """Of every call."""
    num_row_steps: int = 0
    num_output_tokens: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0


class Engine:
    """One vLLM engine in this process."""

    def __init__(self, model: str, method: str, *, batch: int, max_model_len: int, dtype: str) -> None:
        os.environ.update(ENVIRONMENT)
        if "ssd" not in method:  # where numba is imported first, vLLM 0.32 fails on a CPU in bfloat16
            os.environ["VLLM_PLUGINS"] = ""
        from vllm import LLM

        self._llm = LLM(
            model=model,
            dtype=dtype,
            max_model_len=max_model_len,
            max_num_seqs=batch,
            enforce_eager=True,
            enable_prefix_caching=False,
            seed=0,
            speculative_config=METHODS[method],
            disable_log_stats=True,
        )
        self._runner = self._llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
        self.drafting = Drafting()
        drafter = getattr(self._runner, "drafter", None)
        if drafter is not None:
            self._time(drafter)

    def complete(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> tuple[list[list[int]], float]:
        """Greedy outputs of all prompts, as many at a time as the batch has rows, and the seconds they took."""
        from vllm import SamplingParams

        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, detokenize=False)
        asked = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        start = time.perf_counter()
        outputs = self._llm.generate(asked, params, use_tqdm=False)
        seconds = time.perf_counter() - start
        return [list(output.outputs[0].token_ids) for output in outputs], seconds

    def counters(self) -> dict[str, Any]:
        """Everything counted so far; for our proposer its own counters too."""
        drafter = getattr(self._runner, "drafter", None)
        own = asdict(drafter.stats()) if drafter is not None and hasattr(drafter, "stats") else {}
        return {**asdict(self.drafting), "proposer": own}

    def close(self) -> None:
        """Shut the engine down as vLLM does."""
        self._llm.llm_engine.engine_core.shutdown()

    def _time(self, drafter: Any) -> None:
        propose, drafting = drafter.propose, self.drafting
        signature = inspect.signature(propose)

        def timed(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            drafts = propose(*args, **kwargs)
            drafting.propose_us.append(round(1e6 * (time.perf_counter() - start), 1))
            sampled = signature.bind(*args, **kwargs).arguments["sampled_token_ids"]
            for new, draft in zip(sampled, drafts, strict=True):
                drafting.num_row_steps += bool(new)
                drafting.num_output_tokens += len(new)
                drafting.num_accepted_tokens += max(0, len(new) - 1)
                drafting.num_draft_tokens += len(draft)

            return drafts

        drafter.propose = timed
