"""Tables and arrays as records: Parquet, Arrow and datasets on disk, and .npy."""

from __future__ import annotations

import io
import json
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from itertools import accumulate, pairwise
from pathlib import Path
from typing import IO, Any, Final

import numpy as np
import numpy.typing as npt

from cache_builder.inputs.record import LONGEST_RECORD, InputError, Progress, Record
from cache_builder.inputs.streams import is_url, open_raw
from ssd.errors import first_line

DATASET_STATE: Final = "state.json"
DATASET_SPLITS: Final = "dataset_dict.json"

_BATCH_ROWS = 1024
_BUFFER = 1 << 20  # of a column, else a whole row group is in memory
_MOST_STATE_BYTES = 1 << 24


def row_group_bytes(name: str) -> list[int]:
    """Uncompressed bytes of each row group of a Parquet file; raises InputError."""
    with _parquet(name) as file:
        metadata = file.metadata
        return [max(1, metadata.row_group(number).total_byte_size) for number in range(metadata.num_row_groups)]


def parquet_rows(
    name: str, columns: Collection[str], progress: Progress, start: int = 0, stop: int | None = None
) -> Iterator[Record]:
    """The rows of row groups ``start`` .. ``stop`` with those of ``columns`` that are there, all where none is.

    Raises InputError for what is no Parquet file or is damaged.
    """
    with _parquet(name) as file:
        last = file.metadata.num_row_groups if stop is None else stop
        sizes = [file.metadata.row_group(number).num_rows for number in range(last)]
        first_rows = list(accumulate(sizes, initial=0))
        chosen = _chosen(file.schema_arrow.names, columns)
        for number in range(start, last):
            row = first_rows[number]
            for batch in file.iter_batches(_BATCH_ROWS, row_groups=[number], columns=chosen, use_threads=False):
                yield from _rows(name, batch, row)
                row += len(batch)
            progress(_stored_bytes(file.metadata.row_group(number)))
            _give_back()


def arrow_batches(name: str) -> int:
    """How many record batches an Arrow file has; raises InputError. Of a file here the data is not read."""
    with _arrow(name, lambda num_bytes: None) as batches:
        return sum(1 for _ in batches)


def arrow_rows(
    name: str, columns: Collection[str], progress: Progress, start: int = 0, stop: int | None = None
) -> Iterator[Record]:
    """The rows of record batches ``start`` .. ``stop`` of an Arrow file, as datasets keep their data.

    ``columns`` and errors as for ``parquet_rows``.
    """
    row = 0
    with _arrow(name, progress) as batches:
        for number, batch in enumerate(batches):
            if stop is not None and number >= stop:
                return
            if number >= start:
                selected = batch.select(_chosen(batch.schema.names, columns))
                yield from _rows(name, selected, row)
                if not is_url(name):
                    progress(batch.nbytes)
            row += len(batch)


def dataset_files(directory: Path, split: str | None) -> list[Path] | None:
    """The Arrow files of a dataset that was saved to disk, of its split ``split``; None for any other directory.

    Raises InputError where the split is not there or has to be chosen.
    """
    if (directory / DATASET_SPLITS).is_file():
        splits = _json(directory / DATASET_SPLITS).get("splits")
        names = [name for name in splits if isinstance(name, str)] if isinstance(splits, list) else []
        chosen = names[0] if split is None and len(names) == 1 else split
        if chosen not in names:
            raise InputError(f"{directory}: give --split, one of {', '.join(names) or 'none: it has no splits'}")
        directory = directory / chosen
    if not (directory / DATASET_STATE).is_file():
        return None
    state = _json(directory / DATASET_STATE)
    if state.get("_indices_files"):
        raise InputError(f"{directory}: its rows are chosen by an index. Save it anew after flatten_indices()")
    listed = state.get("_data_files")
    files = []
    for entry in listed if isinstance(listed, list) else []:
        file = entry.get("filename") if isinstance(entry, dict) else None
        if not isinstance(file, str) or Path(file).name != file:
            raise InputError(f"{directory / DATASET_STATE}: names no files beside it. Save the dataset again")
        files.append(directory / file)
    return files


def _json(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            content = json.loads(file.read(_MOST_STATE_BYTES))
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"{path}: cannot be read: {first_line(error)}. Save the dataset again") from None
    if not isinstance(content, dict):
        raise InputError(f"{path}: is no description of a dataset. Save the dataset again")
    return content


def _chosen(there: list[str], columns: Collection[str]) -> list[str]:
    return [name for name in there if name in columns] or there


def _rows(name: str, batch: Any, first: int) -> Iterator[Record]:
    batch.validate(full=True)  # what lies outside of a buffer is not read
    columns = {field: _values(batch.column(place)) for place, field in enumerate(batch.schema.names)}
    for row in range(len(batch)):
        line: Mapping[str, Any] = {field: values[row] for field, values in columns.items() if values[row] is not None}
        yield Record(f"{name}: row {first + row + 1}", "", is_json=True, line=line)


def _values(column: Any) -> Any:
    """The values of a column, lists of integers as arrays: a million tokens are not made a million objects."""
    import pyarrow as pa

    kind = column.type
    if (pa.types.is_list(kind) or pa.types.is_large_list(kind)) and pa.types.is_integer(kind.value_type):
        if column.null_count or column.values.null_count:
            return column.to_pylist()
        offsets = column.offsets.to_numpy()
        values = column.values.to_numpy()
        return [np.asarray(values[start:stop]) for start, stop in pairwise(offsets)]
    return column.to_pylist()


@contextmanager
def _parquet(name: str) -> Iterator[Any]:
    with _library(name, "Parquet"):
        import pyarrow.parquet

        if is_url(name):
            with open_raw(name) as raw, pyarrow.parquet.ParquetFile(raw, buffer_size=_BUFFER) as file:
                yield file
        else:
            with pyarrow.parquet.ParquetFile(name, buffer_size=_BUFFER) as file:
                yield file


def _give_back() -> None:
    """What Arrow keeps of the memory it does not need, a few batches' worth, goes back."""
    import pyarrow as pa

    pa.default_memory_pool().release_unused()


def _stored_bytes(group: Any) -> int:
    return sum(group.column(number).total_compressed_size for number in range(group.num_columns))


@contextmanager
def _arrow(name: str, progress: Progress) -> Iterator[Iterator[Any]]:
    """The batches of a file in one of the two forms."""
    with _library(name, "Arrow"):
        import pyarrow as pa

        with open_raw(name, progress) if is_url(name) else pa.memory_map(name) as source:
            is_file_format = _begins_with(source, b"ARROW1")
            if is_file_format:
                reader = pa.ipc.open_file(source)
                yield (reader.get_batch(number) for number in range(reader.num_record_batches))
            else:
                yield iter(pa.ipc.open_stream(source))


def _begins_with(source: Any, magic: bytes) -> bool:
    if isinstance(source, io.BufferedReader):
        return source.peek(len(magic))[: len(magic)] == magic
    found = bytes(source.read(len(magic)))
    source.seek(0)
    return found == magic


@contextmanager
def _library(name: str, kind: str) -> Iterator[None]:
    try:
        import pyarrow as pa
    except ModuleNotFoundError:
        raise InputError(f"{name}: {kind} files need pyarrow: pip install 'ssd-serving[builder]'") from None
    try:
        yield
    except InputError:
        raise
    except (pa.ArrowException, OSError, ValueError, MemoryError, OverflowError) as error:
        raise InputError(f"{name}: cannot be read as a {kind} file: {first_line(error)[:300]}") from None


END: Final = -1

_PIECE: Final = 1 << 18
_MOST_AT_ONCE: Final = 1 << 28
"""Numbers of a part. Large files are read in parts, but for packed ones."""


def array_header(shown: str, file: IO[bytes]) -> tuple[int, np.dtype[Any]]:
    """How many numbers the file holds, and their type; raises InputError."""
    try:
        version = np.lib.format.read_magic(file)
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, _, dtype = read(file)
    except OSError:
        raise
    except Exception as error:  # it is read as Python's own text
        raise InputError(f"{shown}: no .npy file ({first_line(error)[:200]}). Write it with numpy.save") from None
    if len(shape) != 1 or dtype.kind not in "iu" or dtype.itemsize > 8:
        raise InputError(f"{shown}: an array int32[n] was expected, -1 after every sequence, got {dtype}{list(shape)}")
    return shape[0], dtype


def array_sequences(shown: str, file: IO[bytes], start: int = 0, stop: int | None = None) -> Iterator[Record]:
    """The sequences that begin within numbers ``start`` .. ``stop``; raises InputError, and what reading raises.

    In memory of these.
    """
    size, dtype = array_header(shown, file)
    stop = size if stop is None else min(stop, size)
    first = max(0, start - 1)  # what begins at ``start`` stands behind an END
    if first:
        file.seek(first * dtype.itemsize, 1)
    if stop - first > _MOST_AT_ONCE:
        raise InputError(f"{shown}: {stop - first} numbers at once are too many: give it as it is, not packed")

    def read(count: int) -> npt.NDArray[Any]:
        data = file.read(count * dtype.itemsize)
        if len(data) < count * dtype.itemsize:
            raise InputError(f"{shown}: it ends within its {size} numbers. Copy it again")
        return np.frombuffer(data, dtype)

    pieces = [read(stop - first)]
    at, is_ended = stop, stop == first or pieces[0][-1] == END
    while at < size and not is_ended:  # the last sequence goes on behind ``stop``
        pieces.append(read(min(_PIECE, size - at)))
        at, is_ended = at + len(pieces[-1]), bool((pieces[-1] == END).any())
        if at - stop > LONGEST_RECORD:
            raise InputError(f"{shown}: {LONGEST_RECORD} numbers without a -1, which ends a sequence")
    numbers = np.concatenate(pieces)
    ends = np.flatnonzero(numbers == END).tolist()
    begins = [*([0] if start == 0 else []), *(end + 1 for end in ends)]
    for begin, end in zip(begins, [*(ends if start == 0 else ends[1:]), len(numbers)], strict=True):
        if begin < min(stop - first, len(numbers)):
            line = {"token_ids": numbers[begin:end]}
            yield Record(f"{shown}: number {first + begin}", "", is_json=True, line=line)
