"""How often does the width of a pass change a token? Near-ties counted by dtype, width, batch and margin.

``python -m benchmarks.ties [MODEL] [--dtype float32 bfloat16] [--prompts N] [--max-tokens N] [--json]``

Verifying a draft scores several positions in one pass, and other sizes of a matrix product round differently. So where
the two best tokens score nearly the same, a wide pass may choose the other. The reference is greedy decoding with
passes of one position and one row. Its text is then read again, in passes of T positions and in batches of B rows, on
keys and values that such passes wrote, and the token chosen at each position is compared with the reference's. A flip
is another token; its margin is how far the reference's best logit led the second. Batches are measured beside widths
because they are what a server does without speculation too.

The reference is computed twice for some prompts and must repeat itself. Prints a table; the last line of stdout is one
JSON object.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from benchmarks.environment import head
from benchmarks.workloads import snippets
from ssd.bundled import MODEL_PATH
from ssd.model.loading.load_target import DTYPES, load_model, open_target
from ssd.model.target import Target
from ssd.text.codec import TextCodec

WIDTHS = (2, 4, 8, 16, 32, 64)
BATCHES = (2, 4, 8)
EDGES = (0.0, 0.03125, 0.0625, 0.125, 0.25, 0.5)
"""Upper edges of the margins' classes, in logits; the first is of exact ties, one more has no upper edge."""
CHECKED_TWICE = 2


@dataclass(frozen=True, slots=True, eq=False)
class Reference:
    """One prompt's greedy text: ``tokens`` int64[n] after ``prompt``, and the best logit's lead at each, float64[n]."""

    prompt: list[int]
    tokens: npt.NDArray[np.int64]
    margins: npt.NDArray[np.float64]


def main(argv: Sequence[str] | None = None) -> None:
    """Every dtype in turn."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.ties", description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", default=str(MODEL_PATH), help="(default: bundled)")
    parser.add_argument("--dtype", nargs="+", default=["float32", "bfloat16"], choices=sorted(DTYPES))
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--prompts", type=int, default=48)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="print the JSON line only")
    args = parser.parse_args(argv)
    say: Callable[[str], None] = (lambda _line: None) if args.json else print
    codec = TextCodec.load(args.model)
    prompts = [codec.encode_prompt(text)[-192:] for text in snippets(args.seed)[: args.prompts]]
    say(f"ties: {len(prompts)} prompts, up to {args.max_tokens} tokens each, seed {args.seed}")
    runs = []
    for dtype in args.dtype:
        target = open_target(
            load_model(args.model, dtype=dtype, device=args.device), num_slots=max(BATCHES), max_length=512,
            max_draft_tokens=max(WIDTHS),
        )  # fmt: skip
        run = measure(target, prompts, args.max_tokens, codec.eos_token_ids)
        runs.append({"dtype": dtype, **run})
        say(f"\n{dtype}: {run['tokens']} tokens, {run['margins'][0]} of them exact ties")
        say("pass            tokens  flips  per 10,000")
        for row in run["passes"]:
            at_most = f", margins up to {row['largest_margin']:.3g}" if row["flips"] else ""
            rate = 1e4 * row["flips"] / max(1, row["tokens"])
            say(f"{row['size']:3} {row['kind']:10} {row['tokens']:7} {row['flips']:6} {rate:11.1f}{at_most}")
    parameters = {key: value for key, value in vars(args).items() if key not in ("model", "json")}
    result = {**head("ties"), "parameters": parameters, "edges": EDGES, "runs": runs}
    print(json.dumps(result))


def measure(
    target: Target,
    prompts: Sequence[list[int]],
    max_tokens: int,
    eos_token_ids: Sequence[int],
    widths: Sequence[int] = WIDTHS,
    batches: Sequence[int] = BATCHES,
) -> dict[str, Any]:
    """Flips of every width and batch over the greedy texts of ``prompts``.

    ``margins`` counts all tokens by margin, ``flips_by_margin`` those that flipped: int[len(EDGES) + 1] each, classes
    as in `EDGES`. Raises SystemExit if passes of one position do not repeat themselves.
    """
    references = [decode(target, prompt, max_tokens, eos_token_ids) for prompt in prompts]
    for reference in references[:CHECKED_TWICE]:
        if not np.array_equal(decode(target, reference.prompt, max_tokens, eos_token_ids).tokens, reference.tokens):
            raise SystemExit("passes of one position do not repeat themselves: nothing can be compared with them")
    passes = []
    for width in widths:
        pairs = [(reference, read_in_passes(target, reference, width)) for reference in references]
        passes.append(_row("positions", width, pairs))
    for size in batches:
        pairs = []
        for first in range(0, len(references), size):
            group = references[first : first + size]
            if len(group) == size:
                pairs += list(zip(group, read_in_batch(target, group), strict=True))
        passes.append(_row("rows", size, pairs))
    margins = np.concatenate([reference.margins for reference in references])
    return {"tokens": len(margins), "margins": _classes(margins), "passes": passes}


@torch.inference_mode()
def decode(target: Target, prompt: list[int], max_tokens: int, eos_token_ids: Sequence[int]) -> Reference:
    """Greedy text with passes of one position and one row, up to an end-of-text token."""
    _begin(target, [0], [prompt])
    fed = prompt[-1]
    tokens: list[int] = []
    margins: list[float] = []
    while len(tokens) < max_tokens:
        logits = target.forward([0], np.array([[fed]]), [1]).logits[0, -1]
        fed = int(logits.argmax())
        best = torch.topk(logits.double(), 2).values
        tokens.append(fed)
        margins.append(float(best[0] - best[1]))
        if fed in eos_token_ids:
            break
    return Reference(prompt, np.array(tokens, np.int64), np.array(margins))


def read_in_passes(target: Target, reference: Reference, width: int) -> npt.NDArray[np.int64]:
    """The token chosen at each position when the text is read ``width`` positions a pass, without a narrower rest."""
    _begin(target, [0], [reference.prompt])
    fed = np.append(reference.prompt[-1], reference.tokens[:-1])
    chosen = [np.empty(0, np.int64)]
    for first in range(0, len(fed) - width + 1, width):
        part = fed[None, first : first + width]
        chosen.append(target.forward([0], part, [width]).logits[0].argmax(-1).cpu().numpy())
    return np.concatenate(chosen)


def read_in_batch(target: Target, references: Sequence[Reference]) -> list[npt.NDArray[np.int64]]:
    """The same, one position a pass, all texts side by side up to the end of the shortest."""
    slots = list(range(len(references)))
    _begin(target, slots, [reference.prompt for reference in references])
    fed = np.array([reference.prompt[-1] for reference in references])
    chosen = []
    for step in range(min(len(reference.tokens) for reference in references)):
        chosen.append(target.forward(slots, fed[:, None], [1] * len(slots)).logits[:, 0].argmax(-1).cpu().numpy())
        fed = np.array([reference.tokens[step] for reference in references])
    return list(np.array(chosen).T)


def _begin(target: Target, slots: Sequence[int], prompts: Sequence[list[int]]) -> None:
    for slot, prompt in zip(slots, prompts, strict=True):
        target.rollback(slot, 0)
        if len(prompt) > 1:
            target.prefill([slot], np.array([prompt[:-1]], np.int64), [len(prompt) - 1])


def _row(kind: str, size: int, pairs: Sequence[tuple[Reference, npt.NDArray[np.int64]]]) -> dict[str, Any]:
    margins = np.concatenate([reference.margins[: len(chosen)] for reference, chosen in pairs] or [np.empty(0)])
    flipped = np.concatenate(
        [reference.tokens[: len(chosen)] != chosen for reference, chosen in pairs] or [np.empty(0, bool)]
    )
    return {
        "kind": kind,
        "size": size,
        "tokens": len(margins),
        "flips": int(flipped.sum()),
        "flips_by_margin": _classes(margins[flipped]),
        "largest_margin": float(margins[flipped].max(initial=0.0)),
    }


def _classes(margins: npt.NDArray[np.float64]) -> list[int]:
    counts: list[int] = np.bincount(np.searchsorted(EDGES, margins), minlength=len(EDGES) + 1).tolist()
    return counts


if __name__ == "__main__":
    main()
