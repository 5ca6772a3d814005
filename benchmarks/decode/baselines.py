"""``model.generate`` on the same prompt as a plain engine: eager, compiled over a static cache, with prompt lookup."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from transformers import CompileConfig, PreTrainedModel

from benchmarks.decode.steps import OwnAttention, Tokens, synchronize
from ssd.config import DraftConfig, EngineConfig, SamplingParams
from ssd.drafting import make_drafter
from ssd.engine import Engine
from ssd.model.target import Target


def time_generate(
    model: PreTrainedModel, target: Target, prompt: Tokens, num_tokens: int, rounds: int
) -> dict[str, dict[str, Any]]:
    """Tokens a second of each way at batch 1, prompt included, or why a way does not run here; medians of ``rounds``.

    A round runs all ways in turn, the engine without drafts first: ``engine_over_it`` compares within rounds.
    """
    ways: dict[str, Callable[[], list[int]]] = {"engine": lambda: _complete(target, prompt, num_tokens)}
    for name, options in _options(model).items():
        ways[name] = lambda options=options: _generate(model, prompt, num_tokens, options)  # type: ignore[misc]
    found: dict[str, dict[str, Any]] = {}
    rates: dict[str, list[float]] = {name: [] for name in ways}
    texts: dict[str, list[int]] = {}
    for number in range(rounds + 1):
        for name, way in ways.items():
            if "error" in found.get(name, {}):
                continue
            synchronize(model.device)
            began = time.perf_counter()
            try:
                texts[name] = way()
            except Exception as error:  # a compiler may be missing, or a model refuse the cache: not this run's problem
                reason = f"{type(error).__name__}: {str(error).splitlines()[0][:160]}"
                found[name] = {"tokens_per_s": None, "error": reason}
                continue
            if number:  # the first one warms up
                rates[name].append(num_tokens / (time.perf_counter() - began))
    for name, measured in rates.items():
        if "error" not in found.get(name, {}):
            ratios = [ours / theirs for ours, theirs in zip(rates["engine"], measured, strict=True)]
            found[name] = {
                "tokens_per_s": round(median(measured), 2),
                "engine_over_it": round(median(ratios), 3),
                "engine_over_it_min_max": [round(min(ratios), 3), round(max(ratios), 3)],
                "equal_to_eager": texts[name] == texts.get("eager"),
            }
    return found


def _complete(target: Target, prompt: Tokens, num_tokens: int) -> list[int]:
    engine = Engine(target, drafter=make_drafter("none", DraftConfig()), config=EngineConfig(max_num_seqs=1))
    sampling = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
    said = [token for output in engine.generate([prompt.tolist()], sampling) for token in output.token_ids]
    synchronize(target.device)
    return said


def _options(model: PreTrainedModel) -> dict[str, dict[str, Any]]:
    """The ways of ``generate``; it compiles on CUDA only."""
    static: dict[str, Any] = {"cache_implementation": "static"}
    if model.device.type == "cuda":
        compiled = {"compile_config": CompileConfig(fullgraph=False, mode="default"), "disable_compile": False}
        fixed = {"static cache, compiled": static | compiled}
    else:
        fixed = {"static cache": static | {"disable_compile": True}}
    return {"eager": {}, "prompt lookup": {"prompt_lookup_num_tokens": 10}} | fixed


def _generate(model: PreTrainedModel, prompt: Tokens, num_tokens: int, options: dict[str, Any]) -> list[int]:
    ids = torch.from_numpy(prompt.astype("int64"))[None].to(model.device)
    with OwnAttention(model):
        output = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=num_tokens,
            min_new_tokens=num_tokens,
            do_sample=False,
            **options,
        )
    synchronize(model.device)
    said: list[int] = output[0, ids.shape[1] :].tolist()
    return said
