"""From files to a log: every record's requests, in the order of the files or of a time that records have."""

from __future__ import annotations

import json
import math
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, Final

import numpy as np

from cache_builder.evaluation.log import Log
from cache_builder.inputs.examples import examples_of, line_of
from cache_builder.inputs.fields import AS_WE_CALL_THEM, FieldNames
from cache_builder.inputs.record import InputError, Progress, Record
from cache_builder.inputs.records import read_sources
from cache_builder.inputs.sources import Source
from ssd.text.codec import TextCodec

_MOST_LABEL_CHARACTERS: Final = 60
_MISSING: Final = object()


@dataclass(frozen=True, slots=True, eq=False)
class ReadLog:
    """``labels`` : of each request what its record says in the field that was asked for; None where none was.

    ``num_invalid`` : records left out by ``skip_invalid``.
    """

    log: Log
    labels: tuple[str, ...] | None
    num_records: int
    num_invalid: int


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
    num_records = num_invalid = 0
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
        for example in found:
            if not len(example.token_ids):
                continue
            tokens.extend(example.token_ids)
            lengths.append(len(example.token_ids))
            prompts.append(min(example.prompt_length, len(example.token_ids)))
            times.append(seconds)
            if label is not None:
                labels.append(label)
    if not lengths:
        raise InputError("the logs hold no request: nothing can be evaluated")
    starts = np.concatenate([[0], np.cumsum(np.frombuffer(lengths, np.int64))])
    log = Log(np.frombuffer(tokens, np.int32), starts, np.frombuffer(prompts, np.int64).copy())
    order = np.argsort(np.frombuffer(times), kind="stable")
    if (np.diff(order) != 1).any():
        log, labels = _ordered(log, order.tolist()), [labels[number] for number in order] if labels else []
    return ReadLog(log, tuple(labels) if class_by is not None else None, num_records, num_invalid)


def _ordered(log: Log, order: Sequence[int]) -> Log:
    pieces = [log.tokens[log.starts[number] : log.starts[number + 1]] for number in order]
    starts = np.concatenate([[0], np.cumsum([len(piece) for piece in pieces])])
    return Log(np.concatenate(pieces), starts, log.prompt_lengths[order])


def _field(record: Record, path: str) -> Any:
    """What a record has there; _MISSING where it has nothing, and where it is not JSON."""
    if not record.is_json:
        return _MISSING
    value: Any = line_of(record)
    for name in path.split("."):
        if not isinstance(value, Mapping) or name not in value:
            return _MISSING
        value = value[name]
    return value


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
