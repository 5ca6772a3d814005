"""Does the real model speak, and does our engine say the same? ``python -m benchmarks.real_model.check [DIR]``.

``make real-model`` ends with it. Sentences whose end everybody knows must end so, greedily: weights or a tokenizer that
were read wrongly do not know it. Transformers' own ``generate`` and our engine, with speculation, must say the same
tokens; a first difference is let pass only where the two best scores are within the near-tie margin of
``benchmarks/exactness.py``. With speculation and without it, and in passes of any shape, bits must be equal.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from benchmarks.exactness import Report, Setting, compare, reference_greedy, run
from benchmarks.models import default_directory
from ssd.config import SamplingParams
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
    model = load_model(directory, dtype="float32", device="cpu")
    target = open_target(model, num_slots=3, max_length=256, exact="on")
    prompts = [codec.encode_prompt(text) for text, _ in KNOWN_ENDS]
    said = reference_greedy(target, prompts, _MAX_TOKENS, codec.eos_token_ids)
    for (text, end), (tokens, _) in zip(KNOWN_ENDS, said, strict=True):
        if end not in codec.decode(tokens)[: 2 * len(end) + 8]:
            raise ValueError(f"{text!r} goes on with {codec.decode(tokens)!r}, not with {end!r}; make it anew")
    report = Report()
    greedy = [SamplingParams(max_tokens=_MAX_TOKENS, temperature=0.0)] * len(prompts)
    compare(target, prompts, greedy, said, Setting("ssd", 16, 1), eos_token_ids=codec.eos_token_ids, report=report)
    if report.mismatches:
        raise ValueError(f"our engine says other tokens than transformers: {'; '.join(report.mismatches)}")
    ours, _ = run(target, prompts, greedy, None, eos_token_ids=codec.eos_token_ids)
    bits = Report()
    for setting in (Setting("ssd", 16, 3), Setting("oracle", 8, 1), Setting("random", 8, 3)):
        compare(target, prompts, greedy, ours, setting, eos_token_ids=codec.eos_token_ids, report=bits)
    if bits.mismatches:
        raise ValueError(f"speculation changes tokens or log-probabilities: {'; '.join(bits.mismatches)}")
    return (
        f"{KNOWN_ENDS[0][0]!r} goes on with {codec.decode(said[0].token_ids)!r}; {report}, engine against "
        f"transformers; {bits}, speculation on against off; {target.exactness}"
    )


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
