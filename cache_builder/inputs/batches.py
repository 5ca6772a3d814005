"""OpenAI's batches: a file of requests and one of responses, joined by ``custom_id``."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any, Literal, TypeAlias

from cache_builder.inputs.lines import json_lines
from cache_builder.inputs.record import InputError, Record, shown_name
from cache_builder.inputs.streams import open_stream, readable

Side: TypeAlias = Literal["requests", "responses"]

_MOST_BYTES = 1 << 30
"""Of the requests of one file; OpenAI takes 200 MB."""


def side_of(line: Any) -> tuple[Side, str] | None:
    """Which of the two files a line is of, and its ``custom_id``; None for any other."""
    if not isinstance(line, dict) or not isinstance(line.get("custom_id"), str):
        return None
    if isinstance(line.get("body"), dict) and "url" in line:
        return "requests", line["custom_id"]
    return ("responses", line["custom_id"]) if "response" in line else None


class Requests:
    """The requests of some files by their ``custom_id``, as the text they came in."""

    def __init__(self, names: Sequence[str]) -> None:
        """Reads them. Raises InputError."""
        self._by_id: dict[str, str] = {}
        num_bytes = 0
        for name in names:
            with readable(name), open_stream(name) as file:
                for record in json_lines(shown_name(name), file):
                    num_bytes += len(record.text)
                    if num_bytes > _MOST_BYTES:
                        raise InputError(f"{name}: more than {_MOST_BYTES >> 30} GiB of requests: split the batch")
                    line = _loaded(record.text)
                    if (side := side_of(line)) and side[0] == "requests":
                        self._by_id[side[1]] = record.text

    def join(self, responses: Iterator[Record]) -> Iterator[Record]:
        """Every response with its request; one without a request, and a request that failed, as they came."""
        for record in responses:
            line = _loaded(record.text)
            if side := side_of(line):
                request = self._by_id.get(side[1])
                response = line.get("response")
                if not isinstance(response, dict):
                    continue  # the request failed: there is no text
                if request is not None:
                    joined = {"request": _loaded(request), "response": response}
                    yield Record(record.where, "", is_json=True, line=joined)
                    continue
            yield record


def _loaded(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None
