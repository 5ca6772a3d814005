"""Read traces, which are files of recorded requests and outputs of real models, as token ids."""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Iterator
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np

from cache_builder.evaluation.log import RecordedOutput
from ssd.errors import ConfigError

_SUFFIX = ".jsonl.gz"
_END_OF_TEXT = ("</s>", "<|endoftext|>", "<|end_of_text|>", "<|eot_id|>", "<|im_end|>")


def find_trace(name: str) -> Path:
    """Return the file of a trace, given as a path or as a name in $SSD_TRACES. Raises ConfigError if it is missing."""
    return _find(name, "SSD_TRACES", f"{name}{_SUFFIX}", "trace")


def all_traces() -> list[str]:
    """Return the sorted names of the traces in $SSD_TRACES. Raises ConfigError if it is not set or contains none."""
    folder = os.environ.get("SSD_TRACES")
    names = sorted(path.name.removesuffix(_SUFFIX) for path in Path(folder).glob(f"*{_SUFFIX}")) if folder else []
    if not names:
        raise ConfigError(f"no trace was named and SSD_TRACES is {folder!r}; name some, or set it to a folder of them")
    return names


def trace_name(path: Path) -> str:
    """Return the name of a trace in results, without its path."""
    return path.name.removesuffix(_SUFFIX)


def find_tokenizer(name: str) -> Path:
    """Return the tokenizer.json of a directory, a path or a name in $SSD_TOKENIZERS. Raises ConfigError if missing."""
    return _find(name, "SSD_TOKENIZERS", name, "tokenizer directory") / "tokenizer.json"


def _find(name: str, variable: str, relative: str, what: str) -> Path:
    candidates = [Path(name)]
    if variable in os.environ:
        candidates.append(Path(os.environ[variable]) / relative)
    for path in candidates:
        if path.exists():
            return path
    raise ConfigError(f"no {what} {name!r}; give a path, or set {variable} to the folder that holds it")


def read_records(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the JSON objects of a trace in file order."""
    with gzip.open(path, "rt", encoding="utf-8", newline="\n") as lines:
        for line in lines:
            yield json.loads(line)


def read_rows(trace: Path, tokenizer: Path, max_output_tokens: int | None) -> list[RecordedOutput]:
    """Tokenize the first requests of a trace, with at most ``max_output_tokens`` output tokens in total (None: all)."""
    num_tokens, kept = 0, list[RecordedOutput]()
    for row in _rows(trace, tokenizer):
        num_tokens += len(row.output)
        if max_output_tokens is not None and num_tokens > max_output_tokens:
            break
        kept.append(row)
    return kept


def _rows(trace: Path, tokenizer: Path) -> Iterator[RecordedOutput]:
    """Yield the tokenized requests of a trace; prompt and output are tokenized separately, as in serving.

    A session is read at a time, and its requests are views of one array, so its tokens are in memory only once. The
    only special token is end-of-text after every output; without one in the tokenizer, an id above the vocabulary is
    used.
    """
    from tokenizers import Tokenizer

    if not tokenizer.is_file():
        raise ConfigError(f"no tokenizer.json at {tokenizer}")
    found: Any = Tokenizer.from_file(str(tokenizer))
    known = [token_id for token in _END_OF_TEXT if (token_id := found.token_to_id(token)) is not None]
    end_of_text = known[0] if known else max(found.get_vocab().values()) + 1
    for _, group in groupby(read_records(trace), key=itemgetter("session")):
        history, bounds = list[int](), list[tuple[int, int]]()
        for record in group:
            if not record["prompt_is_delta"]:
                yield from _views(history, bounds)
                history, bounds = [], []
            history += found.encode(record["prompt"], add_special_tokens=False).ids
            begin = len(history)
            history += [*found.encode(record["output"], add_special_tokens=False).ids, end_of_text]
            bounds.append((begin, len(history)))
        yield from _views(history, bounds)


def _views(history: list[int], bounds: list[tuple[int, int]]) -> list[RecordedOutput]:
    text = np.array(history, np.int32)
    return [RecordedOutput(text[:begin], text[begin:end]) for begin, end in bounds]
