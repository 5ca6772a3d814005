"""A corpus to build from: token ids in a format that holds them, or text, and a tokenizer for either."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import numpy as np
import numpy.typing as npt

from benchmarks.index.data import completions

KINDS = ("npy", "parquet", "jsonl", "text")
VOCABULARY = 32_000

_ROOT = Path(__file__).parents[2]
_ROWS_AT_ONCE = 2048
_SHARE_KEPT = 0.7


def write_tokenizer(folder: Path) -> Path:
    """A ``tokenizer.json`` of so many words that every id of the corpus is one."""
    vocabulary = {f"w{number}": number for number in range(VOCABULARY)}
    path = folder / "tokenizer.json"
    path.write_text(
        json.dumps(
            {
                "version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "normalizer": None,
                "pre_tokenizer": {"type": "WhitespaceSplit"}, "post_processor": None, "decoder": None,
                "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "w0"},
            }
        )
    )  # fmt: skip
    return path


def write_tokens(path: Path, num_tokens: int, seed: int) -> None:
    """``.npy`` int32[num_tokens], -1 after every document of 200 to 2,000 tokens; a few megabytes in memory."""
    stream = completions("made", VOCABULARY, seed)
    text = np.lib.format.open_memmap(path, "w+", np.int32, (num_tokens,))
    at = 0
    while at < num_tokens:
        tokens = next(stream)[: num_tokens - at - 1]
        text[at : at + len(tokens)] = tokens
        at += len(tokens) + 1
        text[at - 1] = -1
    text.flush()


def write_as(kind: str, tokens: Path, folder: Path, name: str = "corpus") -> Path:
    """The documents of a ``.npy`` file in another format, as "token_ids" of rows or lines."""
    if kind == "npy":
        return tokens
    text = np.load(tokens, mmap_mode="r")
    bounds = [0, *(np.flatnonzero(text == -1) + 1).tolist()]
    path = folder / f"{name}.{kind}"
    if kind == "jsonl":
        with path.open("w") as file:
            for start, stop in pairwise(bounds):
                file.write(f'{{"token_ids": {json.dumps(text[start : stop - 1].tolist())}}}\n')
        return path
    import pyarrow as pa
    import pyarrow.parquet

    schema = pa.schema([("token_ids", pa.list_(pa.int32()))])
    with pa.parquet.ParquetWriter(path, schema) as writer:
        for first in range(0, len(bounds) - 1, _ROWS_AT_ONCE):
            some = bounds[first : first + _ROWS_AT_ONCE + 1]
            rows: list[npt.NDArray[np.int32]] = [text[start : stop - 1] for start, stop in pairwise(some)]
            writer.write_table(pa.table([pa.array(rows, pa.list_(pa.int32()))], schema=schema))
    return path


def write_text(path: Path, num_bytes: int, seed: int) -> None:
    """Lines ``{"text"}`` of some 2 KB: runs of lines of this project's own pages and code, seven of ten kept."""
    files = [
        *_ROOT.glob("docs/*.md"),
        *_ROOT.glob("ssd/**/*.py"),
        *_ROOT.glob("server/**/*.py"),
        *_ROOT.glob("tests/*.py"),
    ]
    lines = [line for file in sorted(files) for line in file.read_text().splitlines(keepends=True)]
    random = np.random.default_rng(seed)
    written = 0
    with path.open("w") as out:
        while written < num_bytes:
            first = int(random.integers(len(lines) - 60))
            kept = random.random(60) < _SHARE_KEPT
            line = json.dumps({"text": "".join(lines[first + place] for place in np.flatnonzero(kept))})
            written += out.write(line + "\n")
