"""What trained draft heads of the bundled model are worth on text that no training has seen.

``python -m benchmarks.head_training DIR...``

Each DIR is what ``python -m ssd.bundled.training.heads --out DIR`` wrote. The model goes on from prompts of files that
neither it nor the head was trained on, greedily and at temperature 0.7; every position of that text is one where the
head drafts a chain of four. Then one pass of the head beside one of the target, in turns. Prints a line for each; the
last line of stdout is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer

from benchmarks.environment import head as facts
from benchmarks.environment import model_facts
from ssd.bundled import MODEL_PATH
from ssd.bundled.training import corpus
from ssd.bundled.training.heads.measure import acceptance
from ssd.bundled.training.heads.texts import Written, held_out_prompts, write_batches
from ssd.model.heads.eagle3 import Eagle3Head
from ssd.model.heads.head import Head, ParallelHead
from ssd.model.heads.layouts.load_head import load_head
from ssd.model.kv.attention import ATTENTION_NAME
from ssd.model.kv.kv_cache import SlotKVCache, SlotRows
from ssd.model.loading.load_target import load_model, open_target

SEED = 7
TEMPERATURES = (0.0, 0.7)
CONTEXT_TOKENS = 256
RECORDED = ("kind", "seed", "threads", "steps", "tokens", "seconds", "rows", "batches", "first_loss", "last_loss")


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.head_training", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("heads", nargs="+", type=Path, metavar="DIR", help="directories of trained heads")
    parser.add_argument("--rows", type=int, default=96, help="texts of each kind (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=200, help="timed passes (default: %(default)s)")
    parser.add_argument("--texts", type=Path, help="file to keep the texts in, and to take them from if it is there")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    model = load_model(MODEL_PATH, dtype="float32", device="cpu").requires_grad_(False)
    tokenizer = Tokenizer.from_file(str(MODEL_PATH / "tokenizer.json"))
    prompts = held_out_prompts(corpus.standard_library(), tokenizer)
    if args.texts is not None and args.texts.exists():
        texts = [Written(*fields) for fields in torch.load(args.texts, weights_only=True)]
    else:
        texts = write_batches(model, prompts, SEED, args.rows, TEMPERATURES)
        if args.texts is not None:
            torch.save([(each.tokens, each.start, each.temperature, each.seed) for each in texts], args.texts)
    results = []
    for directory in args.heads:
        head = load_head(directory, model)
        if isinstance(head, Eagle3Head):
            head.config._attn_implementation = "sdpa"
        held_out = [acceptance(model, head, each) for each in texts]
        result = {**recorded(directory), "bytes": num_bytes(directory), "held_out": held_out}
        results.append(result)
        print(json.dumps(result), flush=True)
    heads = [load_head(directory, model) for directory in args.heads]
    for result, milliseconds in zip(results, pass_times(model, heads, args.rounds), strict=True):
        result |= milliseconds
        print(result["kind"], milliseconds, flush=True)
    parameters = {"rows": len(texts[0].tokens), "rounds": args.rounds, "context_tokens": CONTEXT_TOKENS, "seed": SEED}
    described = {**facts("heads-training"), **model_facts("bundled model", model)}
    print(json.dumps({**described, "parameters": parameters, "results": results}))
    return 0


def recorded(directory: Path) -> dict[str, Any]:
    """What the training wrote down of itself."""
    lines = [json.loads(line) for line in (directory / "training.jsonl").read_text().splitlines()]
    run = next(line for line in lines if "kind" in line and "steps" in line)
    return {name: run[name] for name in RECORDED if name in run}


def num_bytes(directory: Path) -> int:
    """Size of the head's two files."""
    return sum((directory / name).stat().st_size for name in ("config.json", "model.safetensors"))


@torch.inference_mode()
def pass_times(model: Any, heads: Sequence[Head], rounds: int) -> list[dict[str, float]]:
    """Medians of one position behind `CONTEXT_TOKENS`, in the slots as the engine has them: time of the processor."""
    target = open_target(model, num_slots=1, max_length=2 * CONTEXT_TOKENS)
    tokens = np.random.default_rng(0).integers(1, target.vocab_size, (1, CONTEXT_TOKENS))
    target.prefill([0], tokens, [CONTEXT_TOKENS])
    target.warm_up()

    def target_pass() -> None:
        target.forward([0], tokens[:, :1], [1])
        target.rollback(0, CONTEXT_TOKENS)

    calls = [target_pass, *(_head_pass(head, torch.from_numpy(tokens)) for head in heads)]
    seconds: list[list[float]] = [[] for _ in calls]
    for _ in range(rounds + 5):
        for call, found in zip(calls, seconds, strict=True):
            began = time.process_time()
            call()
            found.append(time.process_time() - began)
    target_ms, *head_ms = (round(1e3 * median(found[5:]), 3) for found in seconds)
    return [{"head_pass_ms": each, "target_pass_ms": target_ms} for each in head_ms]


def _head_pass(head: Head, tokens: torch.Tensor) -> Callable[[], Any]:
    features = torch.randn(1, CONTEXT_TOKENS, head.feature_size)
    if isinstance(head, ParallelHead):
        return lambda: head(features[:, -1])
    assert isinstance(head, Eagle3Head) and head.config._attn_implementation == ATTENTION_NAME
    cache = SlotKVCache(1, 2 * CONTEXT_TOKENS, torch.device("cpu"))

    def read(count: int, start: int) -> Any:
        rows = SlotRows.build(cache, [0], count, torch.device("cpu"))
        return head(tokens[:, :count], features[:, :count], torch.arange(start, start + count)[None], slot_rows=rows)

    read(CONTEXT_TOKENS, 0)
    cache.lengths[[0]] += np.asarray([CONTEXT_TOKENS])
    return lambda: read(1, CONTEXT_TOKENS)


if __name__ == "__main__":
    raise SystemExit(main())
