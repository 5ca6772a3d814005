"""Recorded requests, read from log files into one array of token ids."""

from __future__ import annotations

import json
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt

from cache_builder.inputs.record import DEFAULT_FIELD_NAMES, FieldNames, InputError, InputRecord, Progress, get_at_path
from cache_builder.inputs.records import encode_usable_record, fields_of, read_sources
from cache_builder.inputs.sources import Source
from ssd.text.codec import TextCodec

if TYPE_CHECKING:
    from cache_builder.following.block_chains import FollowedText

TokenIds = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class RecordedOutput:
    """One recorded output with the model's input.

    Attributes:
        context: int32[n], the model's input.
        output: int32[m], the recorded output with its end-of-text token.
    """

    context: TokenIds
    output: TokenIds

    def text(self) -> TokenIds:
        """Return the input and the output together: int32[n + m], a copy."""
        return np.concatenate([self.context, self.output])


Int64s = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Log:
    """Recorded requests in their original order.

    Attributes:
        tokens: int32, the prompts and outputs of all requests, one after the other.
        starts: int64[n + 1], the first position of each request in ``tokens``.
        prompt_lengths: int64[n], the prompt tokens of each request; 0 for a document, which has no prompt.
        labels: The class of each request, from the field of ``--class-by``. None: requests are not classified.
        records: int64[n], the index of the record that contains the request. None: each record has one request.
        num_invalid: The number of records skipped because of ``--skip-invalid``.
        num_without_prompt: The number of records with an answer only, whose first token is replayed as the prompt.
        num_without_answer: The number of records without an answer, which are left out.
    """

    tokens: TokenIds
    starts: Int64s
    prompt_lengths: Int64s
    labels: Sequence[str] | None = None
    records: Int64s | None = None
    num_records: int = 0
    num_invalid: int = 0
    num_without_prompt: int = 0
    num_without_answer: int = 0

    def __len__(self) -> int:
        return len(self.prompt_lengths)

    def row(self, number: int) -> RecordedOutput:
        begin, end = int(self.starts[number]), int(self.starts[number + 1])
        cut = begin + int(self.prompt_lengths[number])
        return RecordedOutput(self.tokens[begin:cut], self.tokens[cut:end])

    def is_sibling(self, number: int, earlier: int) -> bool:
        """Return whether two requests are choices of one API call, which must not be drafted from each other."""
        if self.records is None or self.records[number] != self.records[earlier]:
            return False
        return np.array_equal(self.row(number).context, self.row(earlier).context)

    @property
    def output_lengths(self) -> Int64s:
        return np.diff(self.starts) - self.prompt_lengths

    @property
    def replayable(self) -> Int64s:
        """The indices of the requests that can be replayed; documents, which have no prompt, cannot."""
        return np.flatnonzero((self.prompt_lengths > 0) & (self.output_lengths > 0))


_MAX_LABEL_CHARACTERS: Final = 60


def read_log(
    sources: Sequence[Source],
    codec: TextCodec,
    *,
    fields: FieldNames = DEFAULT_FIELD_NAMES,
    class_by: str | None = None,
    skip_invalid: bool = False,
    progress: Progress = lambda num_bytes: None,
) -> Log:
    """Read all requests of log files, in the formats that ``ssd-cache build`` reads.

    ``class_by`` is the name of the field with a request's class, with dots for nested fields. Raises InputError, also
    if the log contains no answer, and OSError.
    """
    tokens, lengths, prompts, records = array("i"), array("q"), array("q"), array("q")
    labels = list[str]()
    num_records = num_invalid = num_without_prompt = num_without_answer = 0
    beside = () if class_by is None else (class_by.partition(".")[0],)
    for record in read_sources(sources, progress, replace(fields, others=beside)):
        found = encode_usable_record(record, codec, fields, skip_invalid=skip_invalid)
        if found is None:
            num_invalid += 1
            continue
        label = None if class_by is None else _label(record, class_by)
        num_records += 1
        num_without_prompt += not found.has_prompt
        num_without_answer += not found.has_answer
        for example in found.examples:
            token_ids = np.asarray(example.token_ids, np.int32)
            if not len(token_ids):
                continue
            tokens.frombytes(token_ids.tobytes())
            lengths.append(len(token_ids))
            records.append(num_records)
            prompts.append(min(example.prompt_length or not found.has_prompt, len(token_ids)))
            if label is not None:
                labels.append(label)
    if not any(map(int.__lt__, prompts, lengths)) or not any(prompts):
        raise InputError(
            "the logs contain no prompt with an answer, so nothing can be replayed: give requests with their "
            "responses. (`ssd-cache build` and --warm also accept documents.)"
        )
    starts = np.concatenate([[0], np.cumsum(np.frombuffer(lengths, np.int64))])
    return Log(
        np.frombuffer(tokens, np.int32),
        starts,
        np.frombuffer(prompts, np.int64).copy(),
        labels if class_by is not None else None,
        np.frombuffer(records, np.int64),
        num_records,
        num_invalid,
        num_without_prompt,
        num_without_answer,
    )


def log_of_texts(texts: Sequence[FollowedText]) -> Log:
    """Return the texts that a `Follower` has received, as a log. Raises InputError if none contains output tokens."""
    if not any(text.prompt_length < len(text.tokens) for text in texts):
        raise InputError(
            "no output that fills a block of the KV cache was received, and shorter outputs do not count: "
            "raise --minutes"
        )
    lengths = np.array([len(text.tokens) for text in texts], np.int64)
    return Log(
        np.concatenate([text.tokens for text in texts]),
        np.concatenate([[0], np.cumsum(lengths)]),
        np.array([text.prompt_length for text in texts], np.int64),
        num_records=len(texts),
    )


def _label(record: InputRecord, path: str) -> str:
    value = get_at_path(fields_of(record), path) if record.is_json else None
    if value is None:
        return "(no such field)"
    shown = value if isinstance(value, str) else json.dumps(value, default=str)
    shown = " ".join(shown.split())
    return shown if len(shown) <= _MAX_LABEL_CHARACTERS else shown[: _MAX_LABEL_CHARACTERS - 1] + "…"
