"""Measure how decoding gets faster as the cache fills, by replaying recorded traffic of real models, without a model.

``python -m benchmarks.learning [TRACE...] [--tokenizer DIR] [--max-output-tokens N] [--out FILE] [--picture FILE]``

The recorded outputs are replayed twice: with a cache to which each finished request is added, and, as the baseline,
with the context of the request only (prompt lookup). A verification pass emits the accepted draft tokens and one more
token, so plain decoding emits one token per pass. The requests are divided into windows of equally many output tokens.
Prints the tokens per pass of the first and the last window; the last line of stdout is one JSON object. ``--picture
FILE`` draws some of the traces.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.run import Option, Run
from benchmarks.traces import all_traces, find_tokenizer, find_trace, read_rows, trace_name
from cache_builder.evaluation.costs import flat_curve
from cache_builder.evaluation.decoding import OutputDecoder, warm_up
from cache_builder.evaluation.log import RecordedOutput
from ssd.config import CacheConfig, DraftConfig
from ssd.retrieval.cache_manager import CacheManager

_FREE_WIDTH = 32
"""The number of tokens up to which a verification pass costs as much as a pass of one token, as on a GPU."""
_PANELS = {
    "sql": "SQL (Spider)",
    "agent_tools": "agent with tools (tau-bench)",
    "code_edit": "code edits (aider)",
    "chat": "chat (Arena-Hard)",
}
"""The traces in the picture and their titles."""

OPTIONS: dict[str, Any] = {
    "traces": Option(default=[], positional=True, help="a .jsonl.gz file, or a name in $SSD_TRACES (default: all)"),
    "tokenizer": Option(default="llama3-128k", help="directory with a tokenizer.json, or a name in $SSD_TOKENIZERS"),
    "max_output_tokens": Option(default=150_000, metavar="N", help="maximum number of output tokens per trace"),
    "windows": Option(default=12, least=3, help="number of windows per trace"),
    "picture": Option(default=None, kind=Path, metavar="FILE", help="draw the curves of some traces into this file"),
}
COLUMNS = (
    ("recorded traffic", "{trace}"),
    (">requests", "{requests:,}"),
    (">output tokens", "{output_tokens:,}"),
    (">tokens per forward pass, first twelfth", "{first_cache:.2f}"),
    (">tokens per forward pass, last twelfth", "{last_cache:.2f}"),
    (">tokens per forward pass, last twelfth, prompt lookup only", "{last_context:.2f}"),
)
NOTE = (
    "Decoding without drafts yields 1 token per forward pass. First and last twelfth are the first and the last 8 % of "
    "the output tokens of each recording. Drafts have at most 64 tokens. The cost model assumes that a pass of up to "
    "32 tokens costs as much as a pass of one token. The command is `python -m benchmarks.learning`, with the "
    "tokenizer {parameters[tokenizer]}. Measured on {measured}."
)


def main(argv: Sequence[str] | None = None) -> int:
    under = (
        "benchmarks/traces.py",
        "cache_builder/evaluation",
        "ssd/jit",
        "ssd/config.py",
        "ssd/drafting",
        "ssd/cost_model",
        "ssd/retrieval",
    )
    this = Run("learning", __doc__, argv, OPTIONS, COLUMNS, unsaid=("picture",), under=under)
    tokenizer = find_tokenizer(this.args.tokenizer)
    warm_up()
    for name in this.args.traces or all_traces():
        path = find_trace(name)
        rows = read_rows(path, tokenizer, this.args.max_output_tokens)
        windows = windows_of([len(row.output) for row in rows], this.args.windows)
        this.row({"trace": trace_name(path), "requests": len(rows), **replay(rows, windows)})
    if this.args.picture is not None and (shown := [row for row in this.rows if row["trace"] in _PANELS]):
        plot(sorted(shown, key=lambda row: list(_PANELS).index(row["trace"])), this.args.picture)
    return this.end()


def windows_of(num_tokens: Sequence[int], num_windows: int) -> list[int]:
    """Return the window of each request, such that all windows have about equally many output tokens."""
    ends = np.cumsum(num_tokens)
    return [min(num_windows - 1, int(num_windows * (end - 1) // ends[-1])) for end in ends]


def replay(rows: Sequence[RecordedOutput], windows: Sequence[int]) -> dict[str, Any]:
    """Replay the requests with and without the cache.

    Returns for each window the number of cached tokens at its start and the tokens per pass.

    Raises:
        AssertionError: The passes of a request did not emit exactly its output.
    """
    curve, draft = flat_curve(_FREE_WIDTH), DraftConfig()
    decoders = {name: OutputDecoder(curve, draft=draft, sure=0.0) for name in ("cache", "context")}
    passes = {name: np.zeros(max(windows) + 1, np.int64) for name in decoders}
    cached: dict[int, int] = {}
    with CacheManager(CacheConfig(), "0" * 32, inline=True) as caches:
        cache = caches.get()
        for row, window in zip(rows, windows, strict=True):
            snapshot = cache.snapshot()
            cached.setdefault(window, snapshot.num_tokens)
            for name, searched in (("cache", snapshot), ("context", None)):
                found = decoders[name].decode(row, searched)
                if (emitted := int((found.accepted + 1).sum())) != len(row.output):
                    raise AssertionError(f"{len(row.output)} tokens came out of passes that emitted {emitted}")
                passes[name][window] += len(found.accepted)
            cache.append(row.text(), prompt_length=len(row.context))
            cache.maintain()
    tokens = np.bincount(windows, weights=[len(row.output) for row in rows])
    curves = {
        name: [[cached[each], round(float(tokens[each] / counts[each]), 3)] for each in sorted(cached)]
        for name, counts in passes.items()
    }
    ends = {"first_cache": curves["cache"][0][1]} | {f"last_{name}": curve[-1][1] for name, curve in curves.items()}
    return {"output_tokens": int(tokens.sum()), **ends, **curves}


def plot(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Draw tokens per forward pass against the tokens in the cache, one panel per trace."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(rows), figsize=(3.2 * len(rows), 3.4), sharey=True, squeeze=False)
    for axis, row in zip(axes.flat, rows, strict=True):
        for name, colour, label in (
            ("cache", "#1a7f37", "SSD"),
            ("context", "#8c959f", "without the cache (prompt lookup)"),
        ):
            x, y = np.array(row[name]).T
            axis.plot(x / 1000, y, "o-", color=colour, label=label, linewidth=2, markersize=3.5)
        axis.axhline(1, color="#8c959f", linestyle=":", linewidth=1.2, label="plain decoding")
        axis.set_title(_PANELS[row["trace"]], fontsize=10)
        axis.set_xlabel("tokens in the cache (thousands)", fontsize=9)
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0, 0].set_ylim(bottom=0)
    axes[0, 0].set_ylabel("tokens per forward pass", fontsize=9)
    handles, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="lower center", ncols=3, frameon=False, fontsize=9)
    figure.tight_layout(rect=(0, 0.07, 1, 1))
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


if __name__ == "__main__":
    sys.exit(main())
