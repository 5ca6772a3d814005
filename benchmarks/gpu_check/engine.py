"""The engine on the device: is the output what plain decoding says, and does it get faster with use?"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from benchmarks.decode.steps import passes_of
from benchmarks.exactness import Report, Setting, compare, covering_settings, reference_greedy, run
from benchmarks.gpu_check.scene import Found, Keep, Scene
from benchmarks.growth import repeat, run_stream
from benchmarks.streams import made_stream
from benchmarks.workloads import MIXED, snippets
from ssd.config import SamplingParams
from ssd.model.loading.load_target import load_model, open_target
from ssd.text.codec import TextCodec

_TYPES = ("float32", "bfloat16", "float16")


def exactness(scene: Scene, keep: Keep) -> Found:
    """Every pair of drafter, draft limit and batch size, greedy and sampled.

    In each type the same bits as without speculation, `settle_exactness` asked for them; float32 against ``generate``.
    """
    return _exactness(scene, scene.model, keep)


def growth(scene: Scene, keep: Keep) -> Found:
    """The same requests twice, then a stream with repeats, both at batch 1, float32, speculation on and off in turn."""
    return _growth(scene, scene.model, "float32", keep)


def growth_real(scene: Scene, keep: Keep) -> Found:
    """The same on a pretrained model in bfloat16, and its outputs in float32 compared. Nothing where there is none."""
    if scene.real is None:
        return {"passed": True, "skipped": "no pretrained model: name its directory with --real"}
    found = _growth(scene, scene.real, "bfloat16", keep)
    found["exactness"] = _exactness(scene, scene.real, lambda _: None, types=("float32",), drafters=("ssd", "random"))
    found["passed"] &= found["exactness"]["passed"]
    return found


def _exactness(
    scene: Scene,
    name: str,
    keep: Keep,
    *,
    types: Sequence[str] = _TYPES,
    drafters: Sequence[str] = ("ssd", "prompt-lookup", "random", "oracle"),
) -> Found:
    sizes, codec = scene.sizes, TextCodec.load(name)
    eos = codec.eos_token_ids
    prompts = [codec.encode_prompt(text)[-160:] for text in snippets(1)[: sizes.prompts]]
    greedy = [SamplingParams(max_tokens=sizes.max_tokens, temperature=0.0)] * len(prompts)
    sampled = [
        SamplingParams(max_tokens=sizes.max_tokens, temperature=0.8, top_p=0.95, seed=i) for i in range(len(prompts))
    ]
    found: Found = {"passed": True}
    for dtype in types:
        model = load_model(name, dtype=dtype, device=scene.device)
        target = open_target(model, num_slots=16, max_length=512, exact="on")
        report, is_long = Report(), dtype == "float32"
        expected, _ = run(target, prompts, greedy, None, eos_token_ids=eos)
        drawn, _ = run(target, prompts, sampled, None, eos_token_ids=eos)
        settings = covering_settings(drafters, [1, 4, 16], [1, 4, 16]) if is_long else [Setting("ssd", 16, 8)]
        if is_long:
            theirs = reference_greedy(target, prompts, sizes.max_tokens, eos)
            compare(target, prompts, greedy, theirs, settings[0], eos_token_ids=eos, report=report)
        for setting in settings:
            compare(target, prompts, greedy, expected, setting, eos_token_ids=eos, report=report)
            compare(target, prompts, sampled, drawn, setting, eos_token_ids=eos, report=report)
        print(f"exactness {dtype}: {report}; settings {', '.join(map(str, settings))}", flush=True)
        found[dtype] = {
            "way": target.way,
            "passes": passes_of(target),
            "exact": str(target.exactness),
            "cost": round(target.exactness.cost, 3),
            "settings": [str(setting) for setting in settings],
            "tokens": report.num_tokens,
            "ties": report.num_ties,
            "mismatches": len(report.mismatches),
            "first_mismatches": report.mismatches[:5],
            "first_differences_per_10k_tokens": round(
                1e4 * (report.num_ties + len(report.mismatches)) / max(1, report.num_tokens), 3
            ),
            "passed": report.passed,
        }
        found["passed"] &= found[dtype]["passed"]
        keep(found)
    return found


def _growth(scene: Scene, name: str, dtype: str, keep: Keep) -> Found:
    sizes, codec = scene.sizes, TextCodec.load(name)
    max_tokens = 96 if scene.device != "cpu" else 8
    model = load_model(name, dtype=dtype, device=scene.device)
    options = argparse.Namespace(
        requests=sizes.requests, max_tokens=max_tokens, window=8, batch=1, num_speculative_tokens=64,
        repeated=sizes.repeated, seed=0,
    )  # fmt: skip
    found: Found = {"passed": True, "dtype": dtype, "repeated": repeat(model, codec, options)}
    keep(found)
    print(f"growth: the same requests again {found['repeated']['speedup_second']}x", flush=True)
    on, off = (open_target(model, num_slots=1, max_length=1024, max_draft_tokens=64) for _ in range(2))
    stream = made_stream(MIXED, codec, sizes.requests, seed=0, most_tokens=1024 - max_tokens)
    found["stream"] = summary = run_stream(on, off, codec, stream, "greedy", options).summary()
    if dtype == "float32":
        found["passed"] = not summary["mismatches"] and not found["repeated"]["mismatches"]
    print(f"growth: on/off {summary['speedup_first']} at first, {summary['speedup_last']} at last, "
          f"tokens per step {summary['acceptance_length_first']} to {summary['acceptance_length_last']}")  # fmt: skip
    return found
