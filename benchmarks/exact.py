"""Are a position's logits the same bits in every pass, and what does that cost?

``python -m benchmarks.exact [MODEL] [--dtype float32 bfloat16] [--prompts N] [--max-tokens N] [--out FILE]``

Greedy text is decoded by passes of one position and one row. It is then read again: in passes of T positions, as paths
of trees with other nodes between, in batches of B rows of different length, and behind prefills in chunks; positions of
which any logit has other bits are counted. Then passes are timed by turns with the plan that keeps the bits and without
it (``--exact off``): of one row and of eight, and a prefill. Medians over rounds, with the least and the most.
Prints a table; the last line of stdout is one JSON object. Status 1 where a position differs.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from statistics import median
from typing import Any

import numpy as np
import torch

from benchmarks.models import model_name
from benchmarks.run import Option, Run, spread_text
from benchmarks.workloads import snippets
from ssd.model.loading.load_target import DTYPES, load_model, open_target
from ssd.model.loading.threads import settle_threads
from ssd.model.target import Target, pad_rows
from ssd.model.ways.exactness import settle_exactness
from ssd.text.codec import TextCodec

WIDTHS = (2, 3, 5, 8, 16, 17, 33, 64)
BATCHES = (2, 4, 8)
CHUNKS = (1, 7, 16, 33, 64, 100)
PREFILL = 448
Text = tuple[list[int], list[int], torch.Tensor]
"""A prompt, the text behind its last token, that one first, and the logits at each of its positions."""


OPTIONS: dict[str, Any] = {
    "dtype": Option(default=["float32", "bfloat16"], choices=sorted(DTYPES)),
    "device": Option(default="cpu", choices=("cpu", "cuda")),
    "prompts": 16,
    "max_tokens": 64,
    "rounds": 15,
    "seed": 0,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Every dtype in turn. Returns the exit status."""
    run = Run("exact", __doc__, argv, OPTIONS, has_model=True, under=("ssd/model",))
    args, codec = run.args, TextCodec.load(str(run.args.model))
    prompts = [codec.encode_prompt(text)[-192:] for text in snippets(args.seed)[: args.prompts]]
    for dtype in args.dtype:
        target = open_target(
            load_model(args.model, dtype=dtype, device=args.device),
            num_slots=max(BATCHES), max_length=512, max_draft_tokens=max(WIDTHS), exact="off",
        )  # fmt: skip
        settle_threads(target)
        settle_exactness(target, "on")
        run.say(f"\n{dtype}, {torch.get_num_threads()} threads: {target.exactness}")
        found = dict(compared(target, prompts, args.max_tokens))
        for what, (count, different) in found.items():
            run.say(f"{what:34} {count:7} positions {different:6} differ")
        costs = {what: [median(each), min(each), max(each)] for what, each in costs_of(target, args.rounds)}
        for what, rates in costs.items():
            run.say(f"{what:34} {spread_text(rates, 3)} of the rate without")
        run.row(
            {
                "dtype": dtype,
                "positions": {what: list(pair) for what, pair in found.items()},
                "num_positions": sum(count for count, _ in found.values()),
                "num_different": sum(different for _, different in found.values()),
                "rates": costs,
            }
        )
    is_wrong = any(each["num_different"] for each in run.rows)
    return run.end(model=model_name(args.model), runs=run.rows, is_wrong=is_wrong)


@torch.inference_mode()
def compared(
    target: Target, prompts: Sequence[Sequence[int]], max_tokens: int
) -> Iterator[tuple[str, tuple[int, int]]]:
    """Of each kind of pass: positions compared, and those that differ from passes of one position and one row."""
    texts = [_decoded(target, list(prompt), max_tokens) for prompt in prompts]
    for width in WIDTHS:
        yield f"passes of {width} positions", _total(_by_width(target, text, width) for text in texts)
    if target.can_verify_trees:
        random = np.random.default_rng(0)
        yield "paths of trees", _total(_by_tree(target, text, random) for text in texts)
    for size in BATCHES:
        groups = [texts[first : first + size] for first in range(0, len(texts) - size + 1, size)]
        yield f"{size} rows of different length", _total(_by_batch(target, group) for group in groups)
    for chunk in CHUNKS:
        yield f"behind a prefill by {chunk}", _total(_by_chunk(target, text, chunk) for text in texts)


def _total(pairs: Iterator[tuple[int, int]]) -> tuple[int, int]:
    found = list(pairs)
    return sum(count for count, _ in found), sum(different for _, different in found)


def _prefill(target: Target, slot: int, tokens: Sequence[int], chunk: int = 1 << 20) -> None:
    target.rollback(slot, 0)
    for first in range(0, len(tokens), chunk):
        part = np.array(tokens[first : first + chunk], np.int64)
        target.prefill([slot], part[None], [len(part)])


def _scored(target: Target, slot: int, tokens: Sequence[int]) -> torch.Tensor:
    return target.forward([slot], np.array([tokens], np.int64), [len(tokens)]).logits[0].clone()


def _decoded(target: Target, prompt: list[int], max_tokens: int) -> Text:
    _prefill(target, 0, prompt[:-1])
    text, rows = [prompt[-1]], []
    for _ in range(max_tokens):
        rows.append(_scored(target, 0, text[-1:])[0])
        text.append(int(rows[-1].argmax()))
    return prompt, text[:-1], torch.stack(rows)


def _different(found: torch.Tensor, wanted: torch.Tensor) -> tuple[int, int]:
    return len(found), int((found != wanted).any(-1).sum())


def _by_width(target: Target, text: Text, width: int) -> tuple[int, int]:
    prompt, tokens, wanted = text
    _prefill(target, 0, prompt[:-1])
    parts = [_scored(target, 0, tokens[first : first + width]) for first in range(0, len(tokens), width)]
    return _different(torch.cat(parts), wanted)


def _by_tree(target: Target, text: Text, random: np.random.Generator) -> tuple[int, int]:
    prompt, tokens, wanted = text
    _prefill(target, 0, prompt[:-1])
    found = []
    for first in range(0, len(tokens), 8):
        nodes, parents, path = [tokens[first]], [-1], [0]
        for token in tokens[first + 1 : first + 8]:
            for _ in range(int(random.integers(0, 3))):
                parents.append(int(random.integers(0, len(nodes))))
                nodes.append(int(random.integers(0, target.vocab_size)))
            parents.append(path[-1])
            path.append(len(nodes))
            nodes.append(token)
        logits = target.forward([0], np.array([nodes]), [len(nodes)], parents=np.array([parents])).logits[0]
        found.append(logits[path].clone())
        target.keep_paths([0], [len(nodes)], [np.array(path)])
    return _different(torch.cat(found), wanted)


def _by_batch(target: Target, texts: Sequence[Text]) -> tuple[int, int]:
    """Rows of 1, 2, 3 ... positions beside each other, until each text is read."""
    places, count, different = [0] * len(texts), 0, 0
    for slot, (prompt, _, _) in enumerate(texts):
        _prefill(target, slot, prompt[:-1])
    while slots := [slot for slot, (_, tokens, _) in enumerate(texts) if places[slot] < len(tokens)]:
        parts = [np.array(texts[slot][1][places[slot] :][: 1 + slot % 5]) for slot in slots]
        logits = target.forward(slots, pad_rows(parts), [len(part) for part in parts]).logits
        for row, (slot, part) in enumerate(zip(slots, parts, strict=True)):
            wanted = texts[slot][2][places[slot] : places[slot] + len(part)]
            more = _different(logits[row, : len(part)], wanted)
            count, different = count + more[0], different + more[1]
            places[slot] += len(part)
    return count, different


def _by_chunk(target: Target, text: Text, chunk: int) -> tuple[int, int]:
    prompt, tokens, wanted = text
    _prefill(target, 0, prompt[:-1], chunk)
    return _different(_scored(target, 0, tokens[:4]), wanted[:4])


def costs_of(target: Target, rounds: int) -> Iterator[tuple[str, list[float]]]:
    """Rates with the plan over those without, round by round."""
    length = min(PREFILL, target.max_length - 2)
    for slot in range(target.num_slots):
        target.rollback(slot, 0)

    def decode(size: int) -> Callable[[], None]:
        def passes() -> None:
            slots = list(range(size))
            for _ in range(4):
                target.forward(slots, np.ones((size, 1), np.int64), [1] * size)
            for slot in slots:
                target.rollback(slot, length // 2)

        return passes

    def prefill() -> None:
        _prefill(target, 0, [1] * length)

    for slot in range(target.num_slots):
        _prefill(target, slot, [1] * (length // 2))
    for size in (1, min(8, target.num_slots)):
        yield f"decoding {size} row{'s' if size > 1 else ''}", _ratios(target, decode(size), rounds)
    yield f"prefill of {length} tokens", _ratios(target, prefill, rounds)


def _ratios(target: Target, passes: Callable[[], None], rounds: int) -> list[float]:
    found = []
    for turn in range(rounds):
        seconds: dict[Any, float] = {}
        for wanted in ("on", "off") if turn % 2 else ("off", "on"):
            settle_exactness(target, wanted)
            passes()
            began = time.perf_counter()
            passes()
            seconds[wanted] = time.perf_counter() - began
        found.append(seconds["off"] / seconds["on"])
    settle_exactness(target, "on")
    return found


if __name__ == "__main__":
    sys.exit(main())
