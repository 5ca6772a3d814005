"""Is a sampled answer's law the model's, with our drafts on vLLM's V2 runner? ``python -m benchmarks.vllm.law``

Run by vLLM's own Python, in Triton's interpreter: a random model of 8 tokens, one prompt, temperature 1, a seed for
each of some thousand requests. Counts of what was said at the second and third place are compared with the exact law,
enumerated by transformers. The last line of stdout is one JSON object; status 1 where chi-square's p is below 0.001.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from benchmarks.vllm.engines import Engine
from benchmarks.vllm.interpreter import prepare

_VOCABULARY = 8
_PROMPT = [1, 2, 3, 4, 1, 2, 3, 4, 1, 2]


def main(argv: Sequence[str] | None = None) -> None:
    """Count and compare."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.vllm.law", description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=4000)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--switch", nargs="*", default=["async"], choices=("async", "adaptive"))
    args = parser.parse_args(argv)
    prepare()  # before anything imports Triton
    with tempfile.TemporaryDirectory() as folder:
        law = _make_model(Path(folder))
        engine = Engine(
            folder, "ssd", batch=args.batch, max_model_len=64, dtype="float32", runner="v2", switches=args.switch,
            options={"skip_tokenizer_init": True, "speculative_config": {"num_speculative_tokens": 3}},
        )  # fmt: skip
        sampling = [{"temperature": 1.0, "seed": seed, "ignore_eos": True} for seed in range(args.requests)]
        outputs, seconds = engine.complete([_PROMPT] * args.requests, 3, sampling)
        counters = engine.counters()
        engine.close()
    p, freedom = _compare(np.array(outputs)[:, 1:3], law, args.requests)
    result = {
        "benchmark": "vllm_law", "requests": args.requests, "switches": args.switch, "p": round(p, 4),
        "degrees_of_freedom": freedom, "accepted": counters["num_accepted_tokens"],
        "drafted": counters["num_draft_tokens"], "seconds": round(seconds, 1), "proposer": counters["proposer"],
    }  # fmt: skip
    print(json.dumps(result))
    if p < 0.001 or not counters["num_accepted_tokens"]:
        raise SystemExit("the law is not the model's")


def _make_model(folder: Path) -> np.ndarray:
    """A random model in a folder; the law of its second and third token together, float64[8, 8]."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=_VOCABULARY, hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
            num_key_value_heads=2, max_position_embeddings=64, initializer_range=0.3, bos_token_id=0, eos_token_id=0,
        )
    ).eval()  # fmt: skip
    model.save_pretrained(folder)
    law = np.zeros((_VOCABULARY, _VOCABULARY))
    with torch.inference_mode():
        pairs = [(a, b) for a in range(_VOCABULARY) for b in range(_VOCABULARY)]
        logits = model(torch.tensor([[*_PROMPT, a, b] for a, b in pairs])).logits.double().softmax(-1)
    at = len(_PROMPT) - 1
    for (a, b), chances in zip(pairs, logits, strict=True):
        law[b] += (chances[at, a] * chances[at + 1, b] * chances[at + 2]).numpy()
    return law


def _compare(said: np.ndarray, law: np.ndarray, count: int) -> tuple[float, int]:
    """Chi-square's p of counts of pairs, those expected less than five times together."""
    counts = np.zeros_like(law)
    np.add.at(counts, (said[:, 0], said[:, 1]), 1)
    expected, seen = count * law.ravel(), counts.ravel()
    rare = expected < 5
    expected = np.append(expected[~rare], expected[rare].sum())
    seen = np.append(seen[~rare], seen[rare].sum())
    keep = expected > 0
    statistic = float((((seen - expected) ** 2)[keep] / expected[keep]).sum())
    freedom = int(keep.sum()) - 1
    import torch

    half = torch.tensor([freedom / 2.0, statistic / 2.0], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1])), freedom  # the upper incomplete gamma function


if __name__ == "__main__":
    main()
