"""Count the tokens per verification step of drafters by replaying recorded outputs, without a model.

``python -m benchmarks.replay [TRACE...] --tokenizer DIR... [--drafter NAME...] [--tree] [--out FILE]``

The recorded output takes the place of the target's output. Drafting begins at the end of the prompt. Each step emits
the accepted draft tokens and one more token. After each request, its tokens are added to the index, which is updated at
once; so no text is known before its time, and the counts do not depend on timing. The baseline "oracle" is the best
draft in hindsight. Speed-ups over decoding without drafts are computed for two cost curves of forward passes: one
measured, and one that is flat up to 32 tokens. Drafters of other projects run in the environment that ``make
bench-peers`` creates. Prints a table; the last line of stdout is one JSON object.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

from benchmarks.child import ChildError
from benchmarks.replay.digest import digests
from benchmarks.replay.job import CONTENDER_NAMES, FLAT_WIDTH, MEASURED_PATH, OURS, Plan, run, run_all
from benchmarks.run import Option, Run
from benchmarks.traces import all_traces, find_tokenizer, find_trace, trace_name
from cache_builder.evaluation.costs import flat_curve, read_step_costs
from ssd.config import DraftConfig, IndexConfig
from ssd.errors import ConfigError

_UNDER = (
    "benchmarks/peers",
    "benchmarks/traces.py",
    "benchmarks/walk.py",
    "cache_builder/evaluation",
    "ssd/jit",
    "ssd/config.py",
    "ssd/drafting",
    "ssd/cost_model",
    "ssd/retrieval",
)
_DIGESTED_TOKENS = 20_000
"""The number of output tokens of each trace for ``--digest`` if ``--max-output-tokens`` is not given."""

OPTIONS: dict[str, Any] = {
    "traces": Option(default=[], positional=True, help="a .jsonl.gz file, or a name in $SSD_TRACES (default: all)"),
    "tokenizer": Option(default=[], help="directory with a tokenizer.json, or a name in $SSD_TOKENIZERS (required)"),
    "drafter": Option(default=[OURS], choices=CONTENDER_NAMES),
    "max_draft": Option(default=16, metavar="K", help="maximum number of tokens per draft; with --tree, of nodes"),
    "tree": Option(default=False, help="let drafters draft trees instead of chains"),
    "max_output_tokens": Option(
        default=None,
        kind=int,
        metavar="N",
        help="maximum number of output tokens per trace; later requests are not replayed",
    ),
    "jobs": Option(default=1, metavar="N", help="number of processes, each of which replays one trace at a time"),
    "digest": Option(default=False, help="only print digests of all drafts, to compare versions"),
}
COLUMNS = (
    *((name, f"{{{name}}}") for name in ("trace", "tokenizer", "drafter", "setting")),
    ("output", "{output_tokens}"),
    ("tokens/step", "{mean_acceptance_length:.3f}"),
    ("of oracle", "{of_oracle}"),
    ("drafted/step", "{drafted_per_step:.2f}"),
    ("accepted", "{acceptance_rate:.3f}"),
    ("x flat", "{speed_up[flat 32]:.2f}"),
    ("x measured", "{speed_up[measured]:.2f}"),
)


def main(argv: Sequence[str] | None = None) -> int:
    this = Run("replay", __doc__, argv, OPTIONS, COLUMNS, unsaid=tuple(OPTIONS), under=_UNDER)
    args = this.args
    try:
        plan = Plan(
            drafters=list(dict.fromkeys(args.drafter)),
            draft=DraftConfig(num_speculative_tokens=args.max_draft),
            index=IndexConfig(),
            costs=[flat_curve(FLAT_WIDTH), read_step_costs(MEASURED_PATH).curve],
            tree=args.tree,
            max_output_tokens=args.max_output_tokens,
        )
        if "sglang" in plan.drafters and not plan.tree:
            raise ConfigError("--drafter sglang drafts trees and nothing else; add --tree")
        traces = [find_trace(name) for name in args.traces or all_traces()]
        tokenizers = [find_tokenizer(name) for name in args.tokenizer]
        if not tokenizers:
            raise ConfigError("name a tokenizer, --tokenizer: a directory, or a name in $SSD_TOKENIZERS")
        if args.digest:
            work = partial(digests, args.max_output_tokens or _DIGESTED_TOKENS)
            for lines in run_all(work, traces, tokenizers, args.jobs):
                print(*lines, sep="\n", flush=True)
            return 0
        this.parameters |= {
            "traces": [trace_name(path) for path in traces],
            "tokenizers": [path.parent.name for path in tokenizers],
            "drafters": list(plan.drafters),
            "draft": asdict(plan.draft),
            "index": asdict(plan.index),
            # The curves themselves: the measured one is another after the next `benchmarks.evaluate --save-cost`.
            "costs": {each.name: {"widths": each.widths.tolist(), "costs": each.costs.tolist()} for each in plan.costs},
            **{name: getattr(plan, name) for name in ("tree", "max_output_tokens")},
        }
        for some in run_all(partial(run, plan), traces, tokenizers, args.jobs):
            for result in some:
                this.row(result)
    except (ConfigError, ChildError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return this.end()


if __name__ == "__main__":
    sys.exit(main())
