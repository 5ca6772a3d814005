"""How fast does `ssd-cache build` make a cache, without and with tokenising, and in how much memory?

``python -m benchmarks.building [--tokens N] [--kinds npy parquet jsonl text] [--jobs 1 2] [--out FILE]``

A corpus of N token ids in documents of 200 to 2,000 (`benchmarks.made_text`, "made") is built from each format that
holds ids, and one of text with the bundled model's tokenizer; each by 1 process and by 2. Contexts of the corpus are
then looked up, and counted slowly in it. Memory is that of anonymous pages, less what a build of a few tokens takes.
The last line of stdout is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.made_text import completions
from benchmarks.run import Option, Run
from ssd.bundled import MODEL_PATH
from ssd.config import CacheConfig
from ssd.retrieval.cache import CacheSet
from ssd.retrieval.files import read_manifest
from ssd.retrieval.search import longest_match

KINDS = ("npy", "parquet", "jsonl", "text")
VOCABULARY = 32_000

_ROOT = Path(__file__).parents[1]
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


_LENGTHS = (1, 2, 4, 8, 16, 32)


def check(directory: Path, tokens: Path, num_samples: int, seed: int) -> int:
    """How many contexts were looked up; raises AssertionError where one is not found as often as it is there."""
    text = np.load(tokens, mmap_mode="r")
    random = np.random.default_rng(seed)
    manifest = read_manifest(directory)
    assert manifest is not None
    checked = 0
    with CacheSet(CacheConfig(), manifest.fingerprint, inline=True) as caches:
        caches.get().add_static_directory(directory)
        snapshot = caches.get().snapshot()
        if snapshot.num_tokens != len(text):
            raise AssertionError(f"{snapshot.num_tokens} tokens are stored of {len(text)}")
        while checked < num_samples:
            length = _LENGTHS[checked % len(_LENGTHS)]
            start = int(random.integers(len(text) - length))
            context = np.array(text[start : start + length], np.int32)
            if (context < 0).any():
                continue
            found = longest_match(snapshot, context, length)
            expected = count(text, context)
            if (found.length, found.support) != (length, expected):
                raise AssertionError(f"a context of {length} tokens is there {expected} times, found: {found}")
            checked += 1
    return checked


def count(text: npt.NDArray[np.int32], context: npt.NDArray[np.int32]) -> int:
    """How often ``context`` stands in ``text``. O(text)."""
    places = np.flatnonzero(text[: len(text) - len(context) + 1] == context[0])
    for offset in range(1, len(context)):
        places = places[text[places + offset] == context[offset]]
    return len(places)


_INTERVAL_S = 0.02


def build(inputs: Path, out: Path, tokenizer: Path, jobs: int) -> dict[str, Any]:
    """Seconds, processor seconds, and the peak of each process's private memory, the largest first.

    Raises AssertionError with what the command said when it fails.
    """
    command = [
        sys.executable, "-m", "cache_builder", "build", str(inputs), "--tokenizer", str(tokenizer), "--out", str(out),
        "--force", "--quiet", "--jobs", str(jobs),
    ]  # fmt: skip
    before, began = _ended_s(), time.perf_counter()
    process = subprocess.Popen(command, cwd=_ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    watch = _Watch(process.pid)
    said, errors = process.communicate()
    took = time.perf_counter() - began
    watch.stop()
    if process.returncode:
        raise AssertionError(f"the build failed: {errors[-2000:]}")
    manifest = json.loads((out / "manifest.json").read_text())["manifest"]
    sizes = [segment["num_tokens"] for segment in manifest["segments"]]
    return {
        "seconds": round(took, 2),
        "processor_s": round(_ended_s() - before, 2),
        "tokens": sum(sizes),
        "segments": len(sizes),
        "largest_segment": max(sizes),
        "peaks": sorted(watch.peaks.values(), reverse=True),
        "peak_of_all": watch.peak_of_all,
        "said": said.splitlines()[0].partition(": ")[2],
    }


class _Watch:
    """Samples the private memory of a process and its children, all along."""

    def __init__(self, pid: int) -> None:
        self.peaks: dict[int, int] = {}
        self.peak_of_all = 0
        self._pid = pid
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """No more samples."""
        self._is_over.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._is_over.wait(_INTERVAL_S):
            total = 0
            for pid in [self._pid, *_children(self._pid)]:
                size = _private_bytes(pid)
                total += size
                self.peaks[pid] = max(self.peaks.get(pid, 0), size)
            self.peak_of_all = max(self.peak_of_all, total)


def _children(pid: int) -> list[int]:
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def _private_bytes(pid: int) -> int:
    """Anonymous pages; 0 when it is gone."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon:")), 0)


def _ended_s() -> float:
    """Processor time of all children that ended, and of theirs."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


_TEXT_BYTES_A_TOKEN = 4
_FEW = 1_000


OPTIONS = {
    "tokens": Option(default=32_000_000, help="token ids in the corpus"),
    "text_tokens": Option(default=8_000_000, help="of text, roughly"),
    "kinds": Option(default=list(KINDS), choices=KINDS),
    "jobs": Option(default=[1, 2], help="processes"),
    "samples": Option(default=60, help="contexts looked up and counted"),
    "seed": 0,
}
COLUMNS = (
    ("input", "{kind}"),
    (">processes", "{jobs}"),
    (">tokens", "{tokens:,}"),
    (">seconds", "{seconds}"),
    (">tokens/s", "{tokens_per_s:,}"),
    (">tokens/s a core", "{tokens_per_core_s:,}"),
    (">peak, bytes a token", "{peak_bytes_per_token:.1f}"),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run and print."""
    run = Run("building", __doc__, argv, OPTIONS, COLUMNS)
    for row in _rows(run.args):
        run.row(row)
    return run.end(rows=run.rows, indent=1)


def _rows(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    with tempfile.TemporaryDirectory(prefix="ssd-bench-") as temporary:
        folder = Path(temporary)
        words = write_tokenizer(folder)
        tokens = folder / "corpus.npy"
        write_tokens(tokens, options.tokens, options.seed)
        few = folder / "few.npy"
        write_tokens(few, _FEW, options.seed)
        for kind in options.kinds:
            tokenizer = words
            if kind == "text":
                tokenizer, inputs = MODEL_PATH, folder / "text.jsonl"
                write_text(inputs, options.text_tokens * _TEXT_BYTES_A_TOKEN, options.seed)
            else:
                inputs = write_as(kind, tokens, folder)
            small = few if kind == "text" else write_as(kind, few, folder, "few")
            least = build(small, folder / "least", words, 1)["peaks"][0]
            for jobs in options.jobs:
                out = folder / "out"
                figures = build(inputs, out, tokenizer, jobs)
                checked = 0 if kind == "text" else check(out, tokens, options.samples, options.seed)
                yield _row(kind, jobs, figures, least, checked, inputs.stat().st_size)
            if kind != "npy":
                inputs.unlink()


def _row(kind: str, jobs: int, figures: dict[str, Any], least: int, checked: int, num_bytes: int) -> dict[str, Any]:
    """A row of the result; its peak by token is that of the process with the largest, over its largest segment."""
    return {
        "kind": kind,
        "jobs": jobs,
        "tokens": figures["tokens"],
        "input_bytes": num_bytes,
        "seconds": figures["seconds"],
        "tokens_per_s": round(figures["tokens"] / figures["seconds"]),
        "tokens_per_core_s": round(figures["tokens"] / figures["processor_s"]),
        "segments": figures["segments"],
        "largest_segment": figures["largest_segment"],
        "peak_bytes_per_token": round((figures["peaks"][0] - least) / figures["largest_segment"], 2),
        "peak_mb": round(figures["peak_of_all"] / 1e6),
        "least_mb": round(least / 1e6),
        "lookups_checked": checked,
    }


if __name__ == "__main__":
    sys.exit(main())
