"""Measure the throughput of each drafting variant relative to speculation off, on the same requests.

``python -m benchmarks.contenders [MODEL] [--question sources|mechanisms|overhead] [--rounds N] [--out FILE]``

``--question`` selects one of three comparisons:

- sources: each source of draft tokens alone, and all sources together, on prompts that never repeat;
- mechanisms: all mechanisms together, and all but one. If the throughput of all mechanisms relative to a row is above
  1, the mechanism that this row omits helps;
- overhead: whether speculation is ever slower, at temperature 1 and several batch sizes, with three kinds of traffic:
  cold (empty caches, no prompt twice), adversarial (the cache holds another answer to each prompt, so drafts from long
  matches are rejected) and full (the cache holds a million shuffled tokens, so every lookup finds many matches, and
  drafts from them are rejected). The engine soon stops drafting from text that is always rejected, so the column of
  draft tokens per pass tells how much it drafted. Only steps in which all rows are busy are counted.

The requests are pieces of code (`benchmarks.workloads`) with one seed each. Each round starts with new caches. Within a
round, all variants answer the same requests alternately, a few engine steps at a time, and another variant begins each
time. Every output is compared with the output of speculation off.

The reported ratios are throughputs within one round, including the prefill of prompts: median, minimum, maximum and
95 % confidence interval of the median. They are also given per CPU second, because other programs on the machine affect
that ratio less. Prints a table; the last line of stdout is one JSON object.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import numpy as np
import torch
from transformers import PreTrainedModel

from benchmarks.run import GAIN, Option, Run, bootstrap, spread
from benchmarks.steps import texts_of
from benchmarks.ways import Comparison, Tally, ask, contest, open_engine, ratios, requests_of
from benchmarks.workloads import MIXED, NO_REPEATS, made_stream
from ssd.bundled import HEAD_PATH, MODEL_PATH
from ssd.config import CacheConfig, DraftConfig, EngineConfig, SamplingParams
from ssd.engine import Engine
from ssd.retrieval.cache_manager import CacheManager
from ssd.retrieval.prebuilt import PrebuiltWriter
from ssd.text.codec import TextCodec

OFF, ALL = "off", "all together"

_KNOWN_TOKENS = 1_000_000
"""The number of unrelated tokens in the cache for the traffic "full"."""

Round = Mapping[str, Tally]
"""The measurements of each variant in one round, by the variant's name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """A variant of drafting that is compared; with the name `OFF`, speculation is off."""

    name: str
    draft: DraftConfig = field(default_factory=DraftConfig)
    has_head: bool = False
    keeps_prompts: bool = False


_SOURCES: Final = (
    Way(name="retrieval", draft=DraftConfig(recycling=False)),
    Way(name="recycling", draft=DraftConfig(retrieval=False)),
    Way(name="draft head", draft=DraftConfig(retrieval=False, recycling=False), has_head=True),
    Way(name=ALL, has_head=True),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """The settings of one comparison.

    ``requests`` is the number of requests per round; 0 means one request per row. ``batch`` lists the batch sizes, for
    each of which new engines are opened.
    """

    ways: tuple[Way, ...]
    traffic: tuple[str, ...]
    temperatures: tuple[float, ...]
    top_p: float = 1.0
    batch: tuple[int, ...] = (1,)
    requests: int = 16
    prompt_tokens: int
    max_tokens: int = 64
    rounds: int = 6
    off: Way = Way(name=OFF)


QUESTIONS: Final = {
    "sources": Question(ways=_SOURCES, traffic=("new",), temperatures=(0.0, 0.7), top_p=0.9, prompt_tokens=320),
    "mechanisms": Question(
        ways=(
            Way(name="without index, own text", draft=DraftConfig(retrieval=False), keeps_prompts=True),
            Way(name="without recycling", draft=DraftConfig(recycling=False), keeps_prompts=True),
            Way(name="without trees", draft=DraftConfig(draft_shape="chain"), keeps_prompts=True),
            Way(name="without kept prompts"),
            Way(name=ALL, keeps_prompts=True),
        ),
        traffic=("mixed", "new"),
        temperatures=(0.0, 0.7),
        requests=12,
        prompt_tokens=192,
        max_tokens=40,
        rounds=5,
        off=Way(name=OFF, keeps_prompts=True),
    ),
    "overhead": Question(
        ways=(Way(name=ALL),),
        traffic=("cold", "adversarial", "full"),
        temperatures=(1.0,),
        batch=(1, 2, 4, 8, 32),
        requests=0,
        prompt_tokens=96,
        max_tokens=128,
        rounds=12,
    ),
}

OPTIONS: dict[str, Any] = {
    "question": Option(default="sources", choices=tuple(QUESTIONS)),
    **{
        name: Option(default=None, kind=int, help=f"{about} (default: by --question)")
        for name, about in (
            ("requests", "number of requests per round"),
            ("max_tokens", "maximum number of output tokens per request"),
            ("prompt_tokens", "maximum number of tokens per prompt; only the end is used"),
            ("rounds", "number of rounds, each with all variants alternately"),
        )
    },
    "batch": Option(default=None, kind=int, several=True, metavar="B", help="batch sizes (default: by --question)"),
    "traffic": Option(default=None, several=True, choices=("mixed", "new", "cold", "adversarial", "full")),
    "seed": 0,
}
COLUMNS = (
    ("model", "{model}"),
    ("traffic", "{traffic}"),
    (">batch", "{batch}"),
    (">temperature", "{temperature:g}"),
    ("variant", "{way}"),
    (">draft tokens per forward pass", "{drafted_per_pass[0]:.2f}"),
    (">output tokens per forward pass", "{tokens_per_pass[0]:.2f}"),
    (">throughput relative to speculation off", "{over_off[0]:.2f}x"),
    (">95 % confidence interval", "{over_off_95[0]:.2f}-{over_off_95[1]:.2f}"),
    (">throughput per CPU second, all enabled relative to this row", GAIN.replace("%s", "all_over")),
)
WORDS = {
    "traffic": {
        "cold": "empty cache",
        "adversarial": "misleading cache",
        "full": "large unrelated cache",
        "mixed": "some prompts repeated",
        "new": "no prompt repeated",
    },
    "way": {
        ALL: "all enabled",
        "recycling": "token recycling",
        "without index, own text": "without lookup in cache and context",
        "without recycling": "without token recycling",
        "without trees": "without draft trees",
        "without kept prompts": "without prefix caching",
    },
}
NOTE = (
    "Each value is the median over rounds, including the prefill of prompts. In each round, all variants answered "
    "the same requests, taking turns every few engine steps; all outputs were equal. The confidence intervals were "
    "computed by resampling the rounds. The command is `python -m benchmarks.contenders --question {benchmark}`, with "
    "float32 weights. Measured on {measured}."
)
RUN = (
    "threads: {threads}, {parameters[rounds]} rounds, {parameters[prompt_tokens]} prompt tokens and "
    "{parameters[max_tokens]} output tokens per request"
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return 1 if drafts changed an output, else 0."""
    run = Run("contenders", __doc__, argv, OPTIONS, COLUMNS, has_model=True, has_shapes=True)
    args = run.args
    given = {
        name: getattr(args, name) for name in ("requests", "max_tokens", "prompt_tokens", "rounds", "batch", "traffic")
    }
    question = replace(QUESTIONS[args.question], **{name: value for name, value in given.items() if value})
    run.parameters |= {name: value for name, value in asdict(question).items() if name not in ("ways", "off")}
    run.name = args.question
    codec, model = run.load()
    # The draft head that comes with the bundled model, where it is the model.
    head = HEAD_PATH if not args.shape and Path(args.model) == MODEL_PATH else None
    comparison = Comparison()
    with TemporaryDirectory(prefix="contenders-") as known:
        if "full" in question.traffic:
            _know(Path(known), codec)
        for batch in question.batch:
            ways = [way for way in question.ways if head is not None or way.name == ALL or not way.has_head]
            engines = {way.name: _opened(way, model, codec, question, batch, head) for way in (*ways, question.off)}
            for traffic, temperature in product(question.traffic, question.temperatures):
                where = {"traffic": traffic, "batch": batch, "temperature": temperature}
                rounds = list(_rounds(engines, codec, question, where, args.seed, comparison, Path(known)))
                for way in ways:
                    row = {**where, "way": way.name, **row_of(rounds, way.name)}
                    if args.question == "mechanisms":
                        row["all_over"] = spread(ratios(rounds, ALL, way.name, "tokens_per_cpu_s"))
                    run.row(row)
    run.say(f"{comparison.num_tokens} tokens compared, {comparison.num_mismatches} mismatches")
    return run.end(
        draft_head=None if head is None else head.name,
        compared_tokens=comparison.num_tokens,
        mismatches=comparison.num_mismatches,
        is_exact=comparison.is_exact,
        is_wrong=comparison.num_mismatches > 0 and (comparison.is_exact or model.dtype == torch.float32),
    )


def _opened(
    way: Way, model: PreTrainedModel, codec: TextCodec, question: Question, batch: int, head: Path | None
) -> Engine:
    length = question.prompt_tokens + question.max_tokens + 8
    config = EngineConfig(max_num_seqs=batch, enable_prefix_caching=way.keeps_prompts)
    with_head, drafter = head if way.has_head else None, "none" if way.name == OFF else "ssd"
    return open_engine(
        model, drafter, slots=batch, length=length, draft=way.draft, config=config, head=with_head, codec=codec
    )


def _know(directory: Path, codec: TextCodec) -> None:
    """Write a prebuilt cache for the traffic "full": the tokens of the prompts' code, repeated and shuffled."""
    with PrebuiltWriter(directory, fingerprint=codec.fingerprint) as writer:
        writer.append(
            np.random.default_rng(0).permutation(np.resize(np.array(texts_of(codec), np.int32), _KNOWN_TOKENS))
        )


def _rounds(
    engines: Mapping[str, Engine],
    codec: TextCodec,
    question: Question,
    where: Mapping[str, Any],
    seed: int,
    comparison: Comparison,
    known: Path,
) -> Iterator[Round]:
    """Run the rounds for one kind of traffic, and yield the measurements of each round.

    Each round starts with new caches. If every row answers one request only, an additional first round warms up and is
    not yielded. ``where`` contains traffic, batch size and temperature; ``known`` is the cache directory written by
    `_know`.
    """
    traffic, batch, temperature = where.values()
    number_of_requests = question.requests or batch
    is_short = not question.requests
    mix = MIXED if traffic == "mixed" else NO_REPEATS
    num_prompts = number_of_requests * (1 if mix is MIXED else question.rounds + is_short)
    prompts = made_stream(mix, codec, min(num_prompts, 512), seed, question.prompt_tokens).prompts

    def params(asked: int) -> SamplingParams:
        return SamplingParams(
            max_tokens=question.max_tokens,
            temperature=temperature,
            top_p=question.top_p if temperature else 1.0,
            seed=asked,
            ignore_eos=is_short,
        )

    for number in range(question.rounds + is_short):
        tallies = {name: Tally() for name in engines}
        with ExitStack() as stack:
            for name, engine in engines.items():
                if name != OFF:
                    engine.caches = stack.enter_context(CacheManager(CacheConfig(), fingerprint=codec.fingerprint))
                    if traffic == "full":
                        engine.caches.add_prebuilt_directory(known)
            before = number * number_of_requests
            for first in range(0, number_of_requests, batch):
                asked = range(before + first, before + min(first + batch, number_of_requests))
                requests = requests_of([prompts[one % len(prompts)] for one in asked], list(map(params, asked)))
                if traffic == "adversarial":
                    others = [
                        replace(each, sampling=params(100_000 + one)) for each, one in zip(requests, asked, strict=True)
                    ]
                    for engine in engines.values():
                        if engine.caches is not None:
                            ask(engine, others)
                            engine.caches.flush()
                contest(engines, requests, number + first, comparison, tallies)
            for engine in engines.values():
                engine.caches = None
        if number or not is_short:
            yield tallies


def row_of(rounds: Sequence[Round], name: str) -> dict[str, Any]:
    """Summarize the rounds of one variant: the median, minimum and maximum of each figure."""
    over = ratios(rounds, name, OFF)
    return {
        "tokens_per_pass": spread([each[name].tokens_per_pass for each in rounds]),
        "drafted_per_pass": spread([each[name].drafted / each[name].passes for each in rounds]),
        "tokens_per_s": spread([each[name].tokens_per_s for each in rounds], 2),
        "over_off": spread(over),
        "over_off_95": bootstrap(over),
        "over_off_by_cpu_time": spread(ratios(rounds, name, OFF, "tokens_per_cpu_s")),
    }


if __name__ == "__main__":
    sys.exit(main())
