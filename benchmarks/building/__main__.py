"""How fast does `ssd-cache build` make a cache, without and with tokenising, and in how much memory?

``python -m benchmarks.building [--tokens N] [--kinds npy,parquet,jsonl,text] [--jobs 1,2] [--out FILE]``

A corpus of N token ids in documents of 200 to 2,000 (`benchmarks.index.data`, "made") is built from each format that
holds ids, and one of text with the bundled model's tokenizer; each by 1 process and by 2. Contexts of the corpus are
then looked up, and counted slowly in it. Memory is that of anonymous pages, less what a build of a few tokens takes.
The last line of stdout is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.building import corpus, measuring
from benchmarks.building.checking import check
from benchmarks.environment import head
from ssd.bundled import MODEL_PATH

_TEXT_BYTES_A_TOKEN = 4
_FEW = 1_000


def main(arguments: list[str] | None = None) -> int:
    """Run and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.building", description=(__doc__ or "").split("\n")[0])
    add = parser.add_argument
    add("--tokens", type=int, default=32_000_000, metavar="N", help="token ids in the corpus (default 32,000,000)")
    add("--text-tokens", type=int, default=8_000_000, metavar="N", help="of text, roughly (default 8,000,000)")
    add("--kinds", default=",".join(corpus.KINDS), help="formats, of %(default)s")
    add("--jobs", default="1,2", help="processes (default %(default)s)")
    add("--samples", type=int, default=60, help="contexts looked up and counted (default 60)")
    add("--seed", type=int, default=0)
    add("--out", type=Path, metavar="FILE", help="also write the JSON line there")
    options = parser.parse_args(arguments)
    parameters = {key: value for key, value in vars(options).items() if key != "out"}
    print(json.dumps(parameters), flush=True)
    rows = list(_rows(options))
    result = head("building") | {"parameters": parameters, "rows": rows}
    print(json.dumps(result))
    if options.out is not None:
        options.out.write_text(json.dumps(result, indent=1) + "\n")
    return 0


def _rows(options: argparse.Namespace) -> list[dict[str, Any]]:
    rows = []
    with tempfile.TemporaryDirectory(prefix="ssd-bench-") as temporary:
        folder = Path(temporary)
        words = corpus.write_tokenizer(folder)
        tokens = folder / "corpus.npy"
        corpus.write_tokens(tokens, options.tokens, options.seed)
        few = folder / "few.npy"
        corpus.write_tokens(few, _FEW, options.seed)
        for kind in options.kinds.split(","):
            tokenizer = words
            if kind == "text":
                tokenizer, inputs = MODEL_PATH, folder / "text.jsonl"
                corpus.write_text(inputs, options.text_tokens * _TEXT_BYTES_A_TOKEN, options.seed)
            else:
                inputs = corpus.write_as(kind, tokens, folder)
            small = few if kind == "text" else corpus.write_as(kind, few, folder, "few")
            least = measuring.build(small, folder / "least", words, 1)["peaks"][0]
            for jobs in map(int, options.jobs.split(",")):
                out = folder / "out"
                figures = measuring.build(inputs, out, tokenizer, jobs)
                checked = 0 if kind == "text" else check(out, tokens, options.samples, options.seed)
                rows.append(_row(kind, jobs, figures, least, checked, inputs.stat().st_size))
                print(json.dumps(rows[-1]), flush=True)
            if kind != "npy":
                inputs.unlink()
    return rows


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
