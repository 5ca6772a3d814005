"""``model.generate`` on the same prompt: eager, compiled over a static cache, with prompt lookup."""

from __future__ import annotations

import time
from statistics import median
from typing import Any

import torch
from transformers import PreTrainedModel

from benchmarks.decode.steps import OwnAttention, Tokens, synchronize

WAYS: dict[str, dict[str, Any]] = {
    "eager": {},
    "prompt lookup": {"prompt_lookup_num_tokens": 10},
    "static cache, compiled": {"cache_implementation": "static"},
}


def time_generate(model: PreTrainedModel, prompt: Tokens, num_tokens: int, rounds: int) -> dict[str, dict[str, Any]]:
    """Tokens a second of each way, batch 1, prompt included, median of ``rounds``; or why a way does not run here."""
    ids = torch.from_numpy(prompt.astype("int64"))[None].to(model.device)
    found: dict[str, dict[str, Any]] = {}
    expected: list[int] | None = None
    for name, options in WAYS.items():
        rates = []
        try:
            for _ in range(rounds + 1):
                with OwnAttention(model):
                    synchronize(model.device)
                    began = time.perf_counter()
                    output = model.generate(
                        ids,
                        attention_mask=torch.ones_like(ids),
                        max_new_tokens=num_tokens,
                        min_new_tokens=num_tokens,
                        do_sample=False,
                        **_compiled(name),
                        **options,
                    )
                    synchronize(model.device)
                rates.append(num_tokens / (time.perf_counter() - began))
        except Exception as error:  # a compiler may be missing, or a model refuse the cache: not this run's problem
            found[name] = {"tokens_per_s": None, "error": f"{type(error).__name__}: {str(error).splitlines()[0][:160]}"}
            continue
        text = output[0, ids.shape[1] :].tolist()
        expected = expected or text
        found[name] = {"tokens_per_s": round(median(rates[1:]), 2), "equal_to_eager": text == expected}
    return found


def _compiled(name: str) -> dict[str, Any]:
    if "compiled" not in name:
        return {}
    from transformers import CompileConfig

    return {"compile_config": CompileConfig(fullgraph=False, mode="default"), "disable_compile": False}
