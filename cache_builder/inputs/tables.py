"""Reading of the rows of Parquet and Arrow files as records."""

from __future__ import annotations

import io
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from itertools import accumulate, pairwise
from typing import Any

import numpy as np

from cache_builder.inputs.input_streams import open_raw
from cache_builder.inputs.record import InputError, InputRecord, Progress
from ssd.errors import first_line

_BATCH_ROWS = 1024
_BUFFER = 1 << 20  # without it, a whole row group would be in memory


def row_group_bytes(name: str) -> list[int]:
    """Return the uncompressed size in bytes of each row group of a Parquet file. Raises InputError."""
    with _parquet(name) as file:
        metadata = file.metadata
        return [max(1, metadata.row_group(number).total_byte_size) for number in range(metadata.num_row_groups)]


def parquet_rows(
    name: str, columns: Collection[str], progress: Progress, start: int = 0, stop: int | None = None
) -> Iterator[InputRecord]:
    """Yield the rows of a Parquet file, from the row groups ``start`` .. ``stop``, as records. Raises InputError.

    Only the columns named in ``columns`` are read, or all columns if the file has none of them.
    """
    with _parquet(name) as file:
        import pyarrow as pa

        last = file.metadata.num_row_groups if stop is None else stop
        groups = [file.metadata.row_group(number) for number in range(last)]
        first_rows = list(accumulate((group.num_rows for group in groups), initial=0))
        there = file.schema_arrow.names
        chosen = _select_columns(there, columns)
        for number in range(start, last):
            row = first_rows[number]
            for batch in file.iter_batches(_BATCH_ROWS, row_groups=[number], columns=chosen, use_threads=False):
                yield from _rows(name, batch, row)
                row += len(batch)
            progress(sum(groups[number].column(each).total_compressed_size for each in range(len(there))))
            pa.default_memory_pool().release_unused()  # a few batches' worth


def arrow_rows(name: str, stream: io.BufferedReader, columns: Collection[str]) -> Iterator[InputRecord]:
    """Yield the rows of an Arrow file or of an Arrow stream, as Hugging Face's datasets library writes it, as records.

    Only the columns named in ``columns`` are read, or all columns if the file has none of them. Raises InputError.
    """
    with _pyarrow(name, "an Arrow") as pa:
        is_file = stream.peek(6).startswith(b"ARROW1")
        reader = pa.ipc.open_file(stream) if is_file else pa.ipc.open_stream(stream)
        batches = map(reader.get_batch, range(reader.num_record_batches)) if is_file else reader
        row = 0
        for batch in batches:
            yield from _rows(name, batch.select(_select_columns(batch.schema.names, columns)), row)
            row += len(batch)


def _select_columns(there: list[str], columns: Collection[str]) -> list[str]:
    return [column for column in there if column in columns] or there


def _rows(name: str, batch: Any, first: int) -> Iterator[InputRecord]:
    batch.validate(full=True)  # checks that offsets lie within the buffers
    columns = {field: _values(batch.column(place)) for place, field in enumerate(batch.schema.names)}
    for row in range(len(batch)):
        line: Mapping[str, Any] = {field: values[row] for field, values in columns.items() if values[row] is not None}
        yield InputRecord(f"{name}: row {first + row + 1}", "", is_json=True, line=line)


def _values(column: Any) -> Any:
    """Return the values of a column. Lists of integers stay arrays, because creating an object per token is slow."""
    import pyarrow as pa

    kind = column.type
    is_list = pa.types.is_list(kind) or pa.types.is_large_list(kind)
    if is_list and pa.types.is_integer(kind.value_type) and not column.null_count and not column.values.null_count:
        values = column.values.to_numpy()
        return [np.asarray(values[start:stop]) for start, stop in pairwise(column.offsets.to_numpy())]
    return column.to_pylist()


@contextmanager
def _parquet(name: str) -> Iterator[Any]:
    with (
        _pyarrow(name, "a Parquet") as pa,
        open_raw(name) as raw,
        pa.parquet.ParquetFile(raw, buffer_size=_BUFFER) as file,
    ):
        yield file


@contextmanager
def _pyarrow(name: str, what: str) -> Iterator[Any]:
    try:
        import pyarrow as pa
        import pyarrow.ipc
        import pyarrow.parquet
    except ModuleNotFoundError:
        raise InputError(f"{name} is {what} file, which needs pyarrow: pip install 'ssd-serving[builder]'") from None
    try:
        yield pa
    except InputError:
        raise
    except (pa.ArrowException, OSError, ValueError, MemoryError, OverflowError, IndexError) as error:
        raise InputError(f"{name} cannot be read as {what} file: {first_line(error)[:300]}") from None
