"""Recorded requests: read from files into one array of token ids, and the classes that can be seen in them."""

from __future__ import annotations

import json
import math
from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import xxhash

from cache_builder.inputs.record import AS_WE_CALL_THEM, FieldNames, InputError, Progress, Record, at_path
from cache_builder.inputs.records import examples_of, line_of, read_sources
from cache_builder.inputs.sources import Source
from ssd.text.codec import TextCodec

TokenIds = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Row:
    """One recorded output.

    ``context`` : int32[n], everything the model had seen, with no end-of-text token inside but those of earlier
    outputs.
    ``output`` : int32[m], the recorded output and the end-of-text token.
    """

    context: TokenIds
    output: TokenIds

    def text(self) -> TokenIds:
        """int32[n + m], both, a copy."""
        return np.concatenate([self.context, self.output])


Int64s = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Log:
    """Requests in the order in which they came.

    ``tokens`` : int32, prompt and output of each, one after another. ``starts`` : int64[n + 1], where each begins.
    ``prompt_lengths`` : int64[n]; 0 of a document, which nobody asked for.
    """

    tokens: TokenIds
    starts: Int64s
    prompt_lengths: Int64s

    def __len__(self) -> int:
        return len(self.prompt_lengths)

    def row(self, number: int) -> Row:
        """One request; views."""
        begin, end = int(self.starts[number]), int(self.starts[number + 1])
        cut = begin + int(self.prompt_lengths[number])
        return Row(self.tokens[begin:cut], self.tokens[cut:end])

    @property
    def output_lengths(self) -> Int64s:
        """int64[n]."""
        return np.diff(self.starts) - self.prompt_lengths

    @property
    def with_prompt(self) -> Int64s:
        """int64: numbers of the requests that can be decoded again: the others are documents."""
        return np.flatnonzero((self.prompt_lengths > 0) & (self.output_lengths > 0))


_MOST_LABEL_CHARACTERS: Final = 60
_MISSING: Final = object()


@dataclass(frozen=True, slots=True, eq=False)
class ReadLog:
    """``labels`` : of each request what its record says in the field that was asked for; None where none was.

    ``num_invalid`` : records left out by ``skip_invalid``. ``num_without_prompt`` : records of which only the answer
    is known, decoded from their first token on; ``num_without_answer`` : of calls that say none.
    """

    log: Log
    labels: tuple[str, ...] | None
    num_records: int
    num_invalid: int
    num_without_prompt: int = 0
    num_without_answer: int = 0


def read_log(
    sources: Sequence[Source],
    codec: TextCodec,
    *,
    fields: FieldNames = AS_WE_CALL_THEM,
    class_by: str | None = None,
    time_by: str | None = None,
    skip_invalid: bool = False,
    progress: Progress = lambda num_bytes: None,
) -> ReadLog:
    """All requests of ``sources``, read as ``ssd-cache build`` reads them.

    ``class_by``, ``time_by`` : names of fields of the records, with dots into nested ones; times are numbers or ISO
    8601. Raises InputError (unless ``skip_invalid`` and it is only a record), SSDError, OSError.
    """
    tokens, lengths, prompts = array("i"), array("q"), array("q")
    labels, times = list[str](), array("d")
    num_records = num_invalid = num_without_prompt = num_without_answer = 0
    beside = tuple(path.partition(".")[0] for path in (class_by, time_by) if path is not None)
    for record in read_sources(list(sources), progress, replace(fields, others=beside)):
        try:
            found = examples_of(record, codec, fields)
            label = None if class_by is None else _label(_field(record, class_by))
            seconds = 0.0 if time_by is None else _seconds(record, time_by)
        except InputError:
            if not (skip_invalid and record.is_json):
                raise
            num_invalid += 1
            continue
        num_records += 1
        num_without_prompt += not found.has_prompt
        num_without_answer += not found.has_answer
        for example in found.examples:
            if not len(example.token_ids):
                continue
            tokens.extend(example.token_ids)
            lengths.append(len(example.token_ids))
            prompts.append(min(example.prompt_length or not found.has_prompt, len(example.token_ids)))
            times.append(seconds)
            if label is not None:
                labels.append(label)
    if not any(map(int.__lt__, prompts, lengths)) or not any(prompts):
        raise InputError(
            "the logs hold no answer: nothing can be decoded again. Give requests with their responses; `ssd-cache "
            "build` and --warm take documents"
        )
    starts = np.concatenate([[0], np.cumsum(np.frombuffer(lengths, np.int64))])
    log = Log(np.frombuffer(tokens, np.int32), starts, np.frombuffer(prompts, np.int64).copy())
    order = np.argsort(np.frombuffer(times), kind="stable")
    if (np.diff(order) != 1).any():
        log, labels = _ordered(log, order.tolist()), [labels[number] for number in order] if labels else []
    named = tuple(labels) if class_by is not None else None
    return ReadLog(log, named, num_records, num_invalid, num_without_prompt, num_without_answer)


def _ordered(log: Log, order: Sequence[int]) -> Log:
    pieces = [log.tokens[log.starts[number] : log.starts[number + 1]] for number in order]
    starts = np.concatenate([[0], np.cumsum([len(piece) for piece in pieces])])
    return Log(np.concatenate(pieces), starts, log.prompt_lengths[order])


def _field(record: Record, path: str) -> Any:
    """What a record has there; _MISSING where it has nothing, and where it is not JSON."""
    return at_path(line_of(record), path, _MISSING) if record.is_json else _MISSING


def _label(value: Any) -> str:
    """A class's name."""
    if value is _MISSING or value is None:
        return "(no such field)"
    shown = value if isinstance(value, str) else json.dumps(value, default=str)
    shown = " ".join(shown.split())
    return shown if len(shown) <= _MOST_LABEL_CHARACTERS else shown[: _MOST_LABEL_CHARACTERS - 1] + "…"


def _seconds(record: Record, path: str) -> float:
    value = _field(record, path)
    try:
        if isinstance(value, str):
            try:
                seconds = float(value)
            except ValueError:
                seconds = datetime.fromisoformat(value).timestamp()
        elif isinstance(value, datetime):
            seconds = value.timestamp()
        elif isinstance(value, int | float) and not isinstance(value, bool):
            seconds = float(value)
        else:
            seconds = math.nan
    except (ValueError, OverflowError):
        seconds = math.nan
    if not math.isfinite(seconds):
        raise InputError(f"{record.where}: no time in field {path!r}: a number or an ISO 8601 date was expected")
    return seconds


ASKED_AGAIN: Final = "asked again"
QUOTES: Final = "quotes its prompt"
NEXT_TURN: Final = "next turn"
SHARED: Final = "shared instructions"
NEW: Final = "new text"

DEFINITIONS: Final = {
    ASKED_AGAIN: "the same prompt stands in the logs more than once",
    QUOTES: "at least half of the output stands in its own prompt, in runs of 8 tokens or more",
    NEXT_TURN: "its prompt goes on from the prompt and the answer of another request",
    SHARED: "its prompt begins with the same 64 tokens as at least three others",
    NEW: "none of these",
}
"""Of classes. A request is of the first one that is true of it, whatever the order of the log."""

_RUN_TOKENS: Final = 8
_TURN_TOKENS: Final = 16
_SHARED_TOKENS: Final = 64
_LEAST_SHARING: Final = 4
_FACTOR: Final = 0x9E3779B97F4A7C15

Keys = npt.NDArray[np.uint64]


def classes_of(log: Log) -> list[str]:
    """The class of each request, by its number. O(tokens)."""
    prompts, beginnings = Counter[int](), Counter[int]()
    answered: set[int] = set()
    powers = _powers(int(np.diff(log.starts).max(initial=1)))
    for number in range(len(log)):
        row = log.row(number)
        prompts[_digest(row.context)] += 1
        if len(row.context) >= _SHARED_TOKENS:
            beginnings[_digest(row.context[:_SHARED_TOKENS])] += 1
        behind = len(row.context) // _TURN_TOKENS  # the first block that ends in the answer
        text = row.text()
        if len(row.context) and (behind + 1) * _TURN_TOKENS <= len(text):
            answered.add(int(_beginnings(text[: (behind + 1) * _TURN_TOKENS], powers)[-1]))
    return [_class_of(log.row(number), prompts, beginnings, answered, powers) for number in range(len(log))]


def _class_of(row: Row, prompts: Counter[int], beginnings: Counter[int], answered: set[int], powers: Keys) -> str:
    prompt = row.context
    if len(prompt) and prompts[_digest(prompt)] > 1:
        return ASKED_AGAIN
    if 2 * _num_quoted(row) >= len(row.output) > 0:
        return QUOTES
    if not answered.isdisjoint(_beginnings(prompt, powers).tolist()):
        return NEXT_TURN
    if len(prompt) >= _SHARED_TOKENS and beginnings[_digest(prompt[:_SHARED_TOKENS])] >= _LEAST_SHARING:
        return SHARED
    return NEW


def _digest(tokens: TokenIds) -> int:
    return xxhash.xxh3_64_intdigest(np.ascontiguousarray(tokens).tobytes())


def _powers(count: int) -> Keys:
    """uint64[count], 1, F, F^2, ... modulo 2^64."""
    factors = np.full(count, _FACTOR, np.uint64)
    factors[0] = 1
    return np.cumprod(factors, dtype=np.uint64)


def _beginnings(tokens: TokenIds, powers: Keys) -> Keys:
    """uint64[n // 16]: a hash of the first 16, 32, ... tokens. O(n)."""
    terms = (tokens.astype(np.uint64) + np.uint64(1)) * powers[: len(tokens)]
    ends: Keys = np.cumsum(terms, dtype=np.uint64)[_TURN_TOKENS - 1 :: _TURN_TOKENS]
    return (ends ^ (ends >> np.uint64(29))) * np.uint64(_FACTOR)


def runs(tokens: TokenIds, length: int = _RUN_TOKENS) -> Keys:
    """uint64[n - length + 1]: a hash of each run of ``length`` tokens, by where it begins. O(n)."""
    room = max(0, len(tokens) - length + 1)
    keys = np.zeros(room, np.uint64)
    for place in range(length):
        keys = keys * np.uint64(_FACTOR) + tokens[place : place + room].astype(np.uint64)
    return (keys ^ (keys >> np.uint64(29))) * np.uint64(_FACTOR)


def _num_quoted(row: Row) -> int:
    """Tokens of the output that lie in runs of the prompt."""
    said = np.isin(runs(row.output), runs(row.context))
    begins = np.flatnonzero(said)
    if not len(begins):
        return 0
    change = np.zeros(len(row.output) + 1, np.int64)
    np.add.at(change, begins, 1)
    np.add.at(change, begins + _RUN_TOKENS, -1)
    return int((np.cumsum(change[:-1]) > 0).sum())
