"""Does the real model speak, and does our engine say the same? ``python -m benchmarks.real_model.check [DIR]``.

``make real-model`` ends with it. Sentences whose end everybody knows must end so, greedily: weights or a tokenizer that
were read wrongly do not know it. Then engines are compared as ``python -m benchmarks.exact`` does it.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from benchmarks import exact
from benchmarks.exactness import reference_greedy
from benchmarks.models import default_directory
from ssd.errors import SSDError
from ssd.model.loading.load_target import load_model, open_target
from ssd.text.codec import TextCodec

KNOWN_ENDS = (
    ("The capital of France is Paris. The capital of Italy is", "Rome"),
    ("Monday, Tuesday, Wednesday, Thursday,", "Friday, Saturday, Sunday"),
    ("1, 2, 3, 4, 5, 6,", "7, 8, 9, 10"),
)
"""What each must be continued with, and near its beginning."""

_MAX_TOKENS = 24


def check(directory: Path) -> str:
    """What was seen. Raises ValueError where it is not what it should be, and what loading a model raises."""
    codec = TextCodec.load(str(directory))
    target = open_target(load_model(directory, dtype="float32", device="cpu"), num_slots=1, max_length=256)
    prompts = [codec.encode_prompt(text) for text, _ in KNOWN_ENDS]
    said = reference_greedy(target, prompts, _MAX_TOKENS, codec.eos_token_ids)
    for (text, end), (tokens, _) in zip(KNOWN_ENDS, said, strict=True):
        if end not in codec.decode(tokens)[: 2 * len(end) + 8]:
            raise ValueError(f"{text!r} goes on with {codec.decode(tokens)!r}, not with {end!r}; make it anew")
    asked = [str(directory), "--dtype", "float32", "--prompts", "3", "--max-tokens", str(_MAX_TOKENS), "--rounds", "1"]
    if exact.main(asked):
        raise ValueError("our engine says other tokens than transformers, or speculation changes some, see above")
    return f"{KNOWN_ENDS[0][0]!r} goes on with {codec.decode(said[0].token_ids)!r}"


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.real_model.check")
    parser.add_argument("directory", nargs="?", type=Path, default=default_directory())
    args = parser.parse_args()
    try:
        print(f"real-model: {check(args.directory)}")
    except (SSDError, OSError, ValueError) as error:
        print(f"real-model: {args.directory} does not serve: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
