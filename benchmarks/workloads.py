"""Streams of real requests: pieces of numpy's Python code to be continued.

It is installed wherever we are, so anyone can repeat a run, and the bundled model has not seen it: that was trained on
the standard library. A stream is what a service sees: some requests come again and again from a fixed pool, some are
near-variants of these (the most frequent identifier renamed), and the rest is new. The first time a request of the pool
comes it is new too, so the share of what is known grows with use. Recorded requests, by the name of their trace, are
asked one after another.
"""

from __future__ import annotations

import hashlib
import keyword
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np

from benchmarks.traces import find_trace, read_records
from ssd.text.codec import TextCodec

_SKIPPED = frozenset({"tests", "polynomial"})
"""Folders: the modules of the second are near-copies of each other, and "new" would not be."""
_IDENTIFIER = re.compile(r"\b[A-Za-z_][A-Za-z_0-9]{3,}\b")


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt of a stream. ``kind`` is "new", "repeat" or "variant"."""

    text: str
    kind: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Mix:
    """Chance that a request comes from the pool, or is a variant of one that does; the rest is new."""

    name: str
    recurring: float
    variant: float
    pool_size: int = 40


MIXED = Mix(name="mixed", recurring=0.5, variant=0.2)
NO_REPEATS = Mix(name="no repeats", recurring=0.0, variant=0.0)
MADE = {
    "mixed": MIXED,
    "new": NO_REPEATS,
    "often": Mix(name="often", recurring=0.9, variant=0.05, pool_size=8),
    "variants": Mix(name="variants", recurring=0.0, variant=0.9, pool_size=6),
}
"""By the names that programs take."""


def snippets(seed: int, *, min_lines: int = 6, max_lines: int = 24) -> list[str]:
    """Distinct pieces of code in random order, each cut before the start of a line without trailing spaces."""
    random = np.random.default_rng(seed)
    root = Path(np.__file__).parent
    pieces = []
    for path in sorted(root.rglob("*.py")):
        if not _SKIPPED.isdisjoint(path.relative_to(root).parts):
            continue
        lines = path.read_text("utf-8").splitlines()
        at = 0
        while at + max_lines < len(lines):
            length = int(random.integers(min_lines, max_lines + 1))
            piece = "\n".join(lines[at : at + length]).rstrip()
            if len(piece) > 80:
                pieces.append(piece + "\n")
            at += max_lines + 8  # what follows a piece is in no other piece's prompt
    return [pieces[i] for i in random.permutation(len(pieces))]


def stream(mix: Mix, num_requests: int, seed: int = 0) -> list[Request]:
    """``num_requests`` requests in the order they come; the same for the same arguments."""
    random = np.random.default_rng([seed, 1])
    texts = snippets(seed)
    pool, fresh = texts[: mix.pool_size], iter(texts[mix.pool_size :])
    asked: set[str] = set()
    requests: list[Request] = []
    for _ in range(num_requests):
        draw, member = random.random(), pool[int(random.integers(len(pool)))]
        if draw < mix.recurring:
            requests.append(Request(member, "repeat" if member in asked else "new"))
            asked.add(member)
        elif draw < mix.recurring + mix.variant:
            requests.append(Request(renamed(member, random), "variant"))
        else:
            requests.append(Request(next(fresh), "new"))
    return requests


def shares(requests: Sequence[Request]) -> str:
    """What a stream consists of, for people."""
    counts = Counter(request.kind for request in requests)
    new, repeat, variant = (counts[kind] / len(requests) for kind in ("new", "repeat", "variant"))
    return f"{new:.0%} new, {repeat:.0%} repeated, {variant:.0%} variants"


def renamed(text: str, random: np.random.Generator) -> str:
    """``text`` with its most frequent identifier replaced by another plausible name."""
    names = Counter(name for name in _IDENTIFIER.findall(text) if not keyword.iskeyword(name) and name != "self")
    if not names:
        return text
    old = names.most_common(1)[0][0]
    new = f"{old}_{('value', 'item', 'other', 'local', 'base')[int(random.integers(5))]}"
    return re.sub(rf"\b{re.escape(old)}\b", new, text)


def checksum(requests: list[Request]) -> str:
    """Names the stream: two runs with the same checksum asked the same."""
    joined = "\0".join(request.text for request in requests)
    return hashlib.sha256(joined.encode()).hexdigest()[:16]


PROMPT_TOKENS = 320
"""Of recorded prompts the last so many are asked: agents' are longer than a small model on a CPU can be asked."""

_CHARACTERS = 16 * PROMPT_TOKENS
"""Of a recorded text, from its end; what is before is cut off anyway."""


@dataclass(frozen=True, slots=True)
class Stream:
    """``prompts`` in the order they come. ``shares`` : what they are, for people. ``checksum`` : names the text."""

    name: str
    shares: str
    checksum: str
    prompts: list[list[int]]


def made_stream(mix: Mix, codec: TextCodec, num_requests: int, seed: int, most_tokens: int) -> Stream:
    """Pieces of code, repeated as ``mix`` says."""
    requests = stream(mix, num_requests, seed)
    prompts = [cut(codec, request.text, most_tokens) for request in requests]
    return Stream(mix.name, shares(requests), checksum(requests), prompts)


def open_stream(name: str, codec: TextCodec, num_requests: int, seed: int, most_tokens: int) -> Stream:
    """One that is made, or the first prompts of the trace of this name, which may go on from one another.

    Raises ConfigError where there is no such trace.
    """
    if name in MADE:
        return made_stream(MADE[name], codec, num_requests, seed, most_tokens)
    texts = list(islice(_contexts(name), num_requests))
    prompts = [cut(codec, text, min(most_tokens, PROMPT_TOKENS)) for text in texts]
    named = hashlib.sha256("\0".join(texts).encode()).hexdigest()[:16]
    return Stream(name, f"recorded: {name}", named, prompts)


def cut(codec: TextCodec, text: str, most_tokens: int) -> list[int]:
    """The last tokens of a text, behind the mark of a beginning where its model writes one: some need it."""
    prompt = codec.encode_prompt(text)
    if len(prompt) <= most_tokens:
        return prompt
    if prompt[0] == codec.bos_token_id:
        return [prompt[0], *prompt[len(prompt) - most_tokens + 1 :]]
    return prompt[-most_tokens:]


def _contexts(trace: str) -> Iterator[str]:
    """What the model had been given at each record, from its end: earlier turns where a record only adds to them."""
    session, history = None, ""
    for record in read_records(find_trace(trace)):
        if record["session"] != session or not record["prompt_is_delta"]:
            session, history = record["session"], ""
        history = (history + record["prompt"])[-_CHARACTERS:]
        yield history
        history += record["output"]
