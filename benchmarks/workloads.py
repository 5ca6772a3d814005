"""Workloads for benchmarks: pieces of numpy's Python code that the model is asked to continue, or recorded requests.

The code of numpy is installed with this project, so anyone can repeat a run. The bundled model has not been trained on
it, only on the standard library. As in a real service, some prompts of a stream are repeated from a fixed pool, some
are variants of these (with the most frequent identifier renamed), and the rest are new. The first use of a prompt from
the pool counts as new. The requests of a recorded trace are used in their recorded order.
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
"""Folders of numpy that are not used; in "polynomial", modules are near-copies of each other and would not be new."""
_IDENTIFIER = re.compile(r"\b[A-Za-z_][A-Za-z_0-9]{3,}\b")


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt of a stream. ``kind`` is "new", "repeat" or "variant"."""

    text: str
    kind: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Mix:
    """The probabilities that a prompt is repeated from the pool or is a variant of one of the pool; others are new."""

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
"""The workloads made from numpy's code, by the names that the command lines accept."""


def snippets(seed: int, *, min_lines: int = 6, max_lines: int = 24) -> list[str]:
    """Return distinct pieces of numpy's code in random order. Each ends at a line end, without trailing blank lines."""
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
    """Create ``num_requests`` requests in order. The same arguments give the same requests."""
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
    """Describe the shares of new, repeated and variant prompts in a stream, as text."""
    counts = Counter(request.kind for request in requests)
    new, repeat, variant = (counts[kind] / len(requests) for kind in ("new", "repeat", "variant"))
    return f"{new:.0%} new, {repeat:.0%} repeated, {variant:.0%} variants"


def renamed(text: str, random: np.random.Generator) -> str:
    """Return ``text`` with its most frequent identifier replaced by another plausible name."""
    names = Counter(name for name in _IDENTIFIER.findall(text) if not keyword.iskeyword(name) and name != "self")
    if not names:
        return text
    old = names.most_common(1)[0][0]
    new = f"{old}_{('value', 'item', 'other', 'local', 'base')[int(random.integers(5))]}"
    return re.sub(rf"\b{re.escape(old)}\b", new, text)


def checksum(requests: list[Request]) -> str:
    """Return a hash of all prompts. Two runs with the same checksum used the same prompts."""
    joined = "\0".join(request.text for request in requests)
    return hashlib.sha256(joined.encode()).hexdigest()[:16]


PROMPT_TOKENS = 320
"""The maximum length of a recorded prompt, of which the end is used: agents' prompts are too long for a small model."""

_CHARACTERS = 16 * PROMPT_TOKENS
"""The number of characters from the end of a recorded text that are tokenized, enough for `PROMPT_TOKENS`."""


@dataclass(frozen=True, slots=True)
class Stream:
    """The tokenized prompts of a workload in order, its shares as text for people, and a checksum of its text."""

    name: str
    shares: str
    checksum: str
    prompts: list[list[int]]


def made_stream(mix: Mix, codec: TextCodec, num_requests: int, seed: int, most_tokens: int) -> Stream:
    """Create a stream of numpy's code in which prompts are repeated as ``mix`` says; tokenize it."""
    requests = stream(mix, num_requests, seed)
    prompts = [cut(codec, request.text, most_tokens) for request in requests]
    return Stream(mix.name, shares(requests), checksum(requests), prompts)


def open_stream(name: str, codec: TextCodec, num_requests: int, seed: int, most_tokens: int) -> Stream:
    """Return the workload with this name: one of `MADE`, or the first prompts of a recorded trace.

    The prompts of a trace may continue each other. Raises ConfigError if there is no such trace.
    """
    if name in MADE:
        return made_stream(MADE[name], codec, num_requests, seed, most_tokens)
    texts = list(islice(_contexts(name), num_requests))
    prompts = [cut(codec, text, min(most_tokens, PROMPT_TOKENS)) for text in texts]
    named = hashlib.sha256("\0".join(texts).encode()).hexdigest()[:16]
    return Stream(name, f"recorded: {name}", named, prompts)


def cut(codec: TextCodec, text: str, most_tokens: int) -> list[int]:
    """Tokenize a text and keep only its last ``most_tokens`` tokens, with the BOS token first if the model has one."""
    prompt = codec.encode_prompt(text)
    if len(prompt) <= most_tokens:
        return prompt
    if prompt[0] == codec.bos_token_id:
        return [prompt[0], *prompt[len(prompt) - most_tokens + 1 :]]
    return prompt[-most_tokens:]


def _contexts(trace: str) -> Iterator[str]:
    """Yield the prompt text of each record, with its session's earlier turns if the record has only the new turn."""
    session, history = None, ""
    for record in read_records(find_trace(trace)):
        if record["session"] != session or not record["prompt_is_delta"]:
            session, history = record["session"], ""
        history = (history + record["prompt"])[-_CHARACTERS:]
        yield history
        history += record["output"]
