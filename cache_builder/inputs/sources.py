"""Resolution of the command line's inputs to files, in order, and division of large files into parts."""

from __future__ import annotations

import glob
import json
import re
import secrets
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from cache_builder.inputs.detect import detect_format, is_line_by_line
from cache_builder.inputs.input_streams import (
    COMPRESSED,
    file_system,
    input_errors,
    is_regular,
    is_url,
    open_raw,
    open_stream,
)
from cache_builder.inputs.lines import Side, batch_side
from cache_builder.inputs.record import LONGEST_RECORD, STANDARD_INPUT, Format, InputError
from cache_builder.inputs.sessions import is_session
from cache_builder.inputs.tables import row_group_bytes
from ssd.errors import first_line, quote_value

_FORMATS: dict[str, Format] = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "jsonl",
    ".parquet": "parquet",
    ".pq": "parquet",
    ".csv": "csv",
    ".tsv": "csv",
    ".arrow": "arrow",
    ".feather": "arrow",
    **dict.fromkeys((".traj", ".txt", ".text", ".md", ".rst", ".log"), "auto"),
}
"""Maps file name suffixes to formats; "auto" means that the content decides."""
_ROTATED = re.compile(r"[.-]\d[\d.T_-]*$")
"""Matches the number or date at the end of a rotated log's file name."""
_PEEKED_BYTES = 1 << 16
_MAX_PEEKED_FILES = 1024
_STAMPS = ("ETag", "etag", "mtime", "LastModified", "Last-Modified", "updated")
_COMPRESSION_RATIO = 4
"""The assumed ratio of a file's uncompressed size to its compressed size."""


@dataclass(frozen=True, slots=True)
class Source:
    """An input file, or a part of it: a range of its bytes, or of a Parquet file's row groups.

    Attributes:
        size: The size of the file in bytes. None: unknown.
        stamp: A text that changes when the file changes, such as its modification time. It is random if changes cannot
            be detected. For batch responses, it also changes with the files of the requests.
        start: The first byte or row group.
        stop: The end of the range. None: the end of the file.
        requests: For a file of batch responses, the files that may contain the requests, the most likely first.
    """

    name: str
    format: Format
    size: int | None
    stamp: str
    requests: tuple[str, ...] = ()
    start: int = 0
    stop: int | None = None


def find_sources(names: Sequence[str], format: Format = "auto") -> list[Source]:
    """Resolve inputs (paths, patterns, directories, URLs, and "-" for standard input) to files, in the given order.

    Each file is returned once. In directories, only files of known formats are returned. Files of batch responses are
    joined with the files of their requests. Raises InputError if an input does not exist or cannot be read.
    """
    found: dict[str, Source] = {}
    for name in names:
        for source in _find_remote(name, format) if is_url(name) else _find_local(name, format):
            found.setdefault(source.name, source)
    return _join_batches(list(found.values()))


def _find_local(name: str, format: Format) -> Iterator[Source]:
    path = Path(name)
    if name == STANDARD_INPUT:
        yield Source(name, format, None, secrets.token_hex(8))
    elif path.is_dir():
        yield from _find_in_directory(path, format)
    elif path.exists():
        yield _file(path, format)
    elif glob.has_magic(name):
        matched = sorted(glob.glob(name, recursive=True))  # noqa: PTH207  # absolute ones too
        if not matched:
            raise InputError(f"no file matches {name}: check the pattern, and quote it")
        yield from (_file(match, format) for match in map(Path, matched) if match.is_file())
    else:
        raise InputError(f"{name} does not exist: check the path, or give - for standard input")


def _find_in_directory(path: Path, format: Format) -> Iterator[Source]:
    sources: list[Source] = []
    for file in sorted(path.rglob("*")):
        if _is_known(str(file.relative_to(path))) and file.is_file() and not _is_card(str(file)):
            sources.append(_file(file, format))
    if not sources:
        raise InputError(f"{path} is a directory without a file of a known format: give the files themselves")
    yield from sources


def _file(path: Path, format: Format) -> Source:
    status = path.stat()
    if not is_regular(str(path)):  # the content of a pipe differs in each run
        return Source(str(path), _format_of(str(path), format), None, secrets.token_hex(8))
    return Source(str(path), _format_of(str(path), format), status.st_size, f"{status.st_mtime_ns}")


def _find_remote(name: str, format: Format) -> Iterator[Source]:
    system, path = file_system(name)
    scheme = name.partition("://")[0]
    is_web = scheme in ("http", "https")
    try:
        if not is_web and glob.has_magic(path):
            entries = system.glob(path, detail=True)
        elif not is_web and system.isdir(path):
            found = system.find(path, detail=True)
            known = [key for key in found if _is_known(key.removeprefix(path))]
            entries = {key: found[key] for key in known if not _is_card(str(system.unstrip_protocol(key)))}
        else:
            entries = {name: system.info(path)}
        for key in sorted(entries):
            if entries[key].get("type") == "directory":
                continue
            yield _remote_file(name if key == name else str(system.unstrip_protocol(key)), entries[key], format)
    except FileNotFoundError:
        raise InputError(f"{name} does not exist: check the URL") from None
    except Exception as error:  # fsspec drivers may raise any exception
        raise InputError(f"{name} cannot be read: {first_line(error)}") from None
    if not entries:
        raise InputError(f"{name} contains no file of a known format: check the URL")


def _remote_file(name: str, entry: dict[str, Any], format: Format) -> Source:
    size = entry.get("size")
    stamp = next((str(entry[key]) for key in _STAMPS if entry.get(key)), secrets.token_hex(8))
    return Source(name, _format_of(name, format), size if isinstance(size, int) else None, stamp)


def _strip_suffixes(name: str) -> str:
    """Return a file name without suffixes of compression and rotation and without a URL's query."""
    if is_url(name):
        name = name.partition("?")[0]
    for suffix in COMPRESSED:
        name = name.removesuffix(suffix)
    return _ROTATED.sub("", name)


def _is_known(inside: str) -> bool:
    """Return whether a file in a directory is read: its format is known, and no part of its path is hidden."""
    is_hidden = any(part.startswith((".", "_")) for part in Path(inside).parts)
    return not is_hidden and Path(_strip_suffixes(inside)).suffix.lower() in _FORMATS


def _is_card(name: str) -> bool:
    """Return whether a file is a Hugging Face data set card or a similar description. Raises InputError."""
    last = name.rpartition("/")[2].lower()
    if last == "readme.md":
        with input_errors(name), open_raw(name) as file:
            return file.peek(3).startswith(b"---")
    return last in ("dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json")


def _format_of(name: str, format: Format) -> Format:
    return _FORMATS.get(Path(_strip_suffixes(name)).suffix.lower(), "auto") if format == "auto" else format


def _join_batches(sources: list[Source]) -> list[Source]:
    """Assign to each file of batch responses the files that may contain its requests, the most likely first.

    Requests and responses have the same ``custom_id``. If several batches use the same ids, the i-th file of responses
    gets only the i-th file of requests; InputError is raised if there are more files of one kind than of the other.
    """
    lines = [source for source in sources if source.format == "jsonl" and is_regular(source.name)]
    if not 2 <= len(lines) <= _MAX_PEEKED_FILES:
        return sources
    sides = {source.name: _read_batch_side(source.name) for source in lines}
    asked = {name: side[1] for name, side in sides.items() if side and side[0] == "requests"}
    said = [name for name, side in sides.items() if side and side[0] == "responses"]
    if not asked or len(asked) == len(lines):
        return sources
    names, ids = list(asked), list(asked.values())
    alike = next((custom_id for custom_id in ids if ids.count(custom_id) > 1), None)
    if alike is not None and said and len(said) != len(asked):
        raise InputError(
            f"several of {len(asked)} files of requests begin with the custom_id {quote_value(alike)}, e.g. "
            f"{names[ids.index(alike)]}, so the {len(said)} files of responses cannot be assigned to them: "
            "build from the two files of one batch at a time, and merge the caches"
        )
    stamp = " ".join(f"{source.size} {source.stamp}" for source in lines if source.name in asked)
    joined = []
    for source in sources:
        if source.name in said:
            at = said.index(source.name) % len(names)
            requests = (names[at],) if alike is not None else (*names[at:], *names[:at])
            joined.append(replace(source, stamp=f"{source.stamp} {stamp}", requests=requests))
        elif source.name not in asked:
            joined.append(source)
    return joined


def _read_batch_side(name: str) -> tuple[Side, str] | None:
    with input_errors(name), open_stream(name) as file:
        line = file.readline(_PEEKED_BYTES << 4)
    try:
        return batch_side(json.loads(line))
    except (ValueError, RecursionError):
        return None


def estimate_text_bytes(source: Source) -> int:
    """Return the estimated number of bytes of text in a file after decompression, at least 1."""
    size = source.size or 0
    return max(1, size * _COMPRESSION_RATIO if source.name.endswith(COMPRESSED) or source.format == "parquet" else size)


def split_source(source: Source, part_weight: int) -> list[tuple[Source, int]]:
    """Divide a file into parts of about ``part_weight`` bytes of text, and return each part with its size in bytes.

    Compressed files, JSON arrays, batches, standard input and files on web servers are not divided. Raises InputError.
    """
    weight = estimate_text_bytes(source)
    can_be_cut = (
        source.size is not None
        and weight > part_weight
        and is_regular(source.name)
        and not source.requests
        and not source.name.endswith(COMPRESSED)
        and not source.name.startswith(("http://", "https://"))
    )
    kind = _kind_of(source) if can_be_cut else None
    if kind == "parquet":
        return list(_group_ranges(source, row_group_bytes(source.name), part_weight))
    if kind is not None and source.size is not None:
        return list(_ranges(source, source.size, part_weight))
    return [(source, weight)]


def _kind_of(source: Source) -> Format | None:
    """Return the format of a file that can be split, so that its parts can be read separately; None for other files."""
    if source.format == "parquet":
        return source.format
    with input_errors(source.name), open_raw(source.name) as raw, open_stream(source.name) as file:
        beginning = file.peek(1)
        kind = detect_format(source.format, beginning, source.name)
        is_as_it_is = raw.peek(1)[: len(beginning)] == beginning and bool(beginning.strip())
        is_lines = kind == "jsonl" and is_line_by_line(beginning) and not is_session(file.readline(LONGEST_RECORD))
    can_be_cut = kind in ("parquet", "text") or is_lines
    return kind if is_as_it_is and can_be_cut else None


def _ranges(source: Source, size: int, step: int) -> Iterator[tuple[Source, int]]:
    count = max(1, round(size / step))
    bounds = [size * number // count for number in range(count)]
    for start, stop in zip(bounds, [*bounds[1:], None], strict=True):
        yield replace(source, start=start, stop=stop), max(1, (size if stop is None else stop) - start)


def _group_ranges(source: Source, sizes: Iterable[int], most: int) -> Iterator[tuple[Source, int]]:
    start, held = 0, 0
    for number, size in enumerate(sizes):
        if held and held + size > most:
            yield replace(source, start=start, stop=number), held
            start, held = number, 0
        held += size
    yield replace(source, start=start), max(1, held)
