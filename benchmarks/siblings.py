"""Many samples of one prompt at once: what does it bring that they are drafted from each other while they run?

``python -m benchmarks.siblings [--model DIR] [--samples 4,16,64] [--prompts N] [--rounds N] [--json]``

Best-of-n and self-consistency: every prompt is answered n times, a slot for each sample. All begin together, or each
some passes after the one before, as where something is asked again while it is still being answered. Speculation off,
drafts without and with what the other samples have said so far answer the same prompts in turn; no prompt comes twice,
and a round begins with empty caches. Drafted tokens cost what was measured, which on a CPU is much where many samples
run; beside that, for the tokens a pass, both draft at a low price, as where a GPU has room to spare. Noise is that of a
seed and the sample's number; or coupled, with a stream for each sample, or one for all of them, which then say the
same. It is the same for all contenders, so every output is compared with speculation off, with the near-tie rule of
``benchmarks/exactness.py``. Ratios are of tokens/s within a round,
prompts included; medians over rounds, with the least and the most, and beside them by CPU time. Prints tables; the last
line of stdout is one JSON object.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedModel

from benchmarks.environment import head, model_facts, model_name
from benchmarks.exactness import is_near_tie
from benchmarks.models import add_model
from benchmarks.sources.rounds import Tally, spread
from benchmarks.streams import made_stream
from benchmarks.workloads import NO_REPEATS
from ssd.config import CacheConfig, DraftConfig, EngineConfig, SamplingParams
from ssd.drafting import make_drafter
from ssd.drafting.protocol import Draft, Drafter, DraftRequest
from ssd.drafting.suffix.drafter import SuffixDrafter
from ssd.engine import Engine, Request
from ssd.engine.coupling import Coupling
from ssd.model.loading.load_target import load_model, open_target
from ssd.retrieval.cache import CacheSet
from ssd.text.codec import TextCodec

OFF = "off"
ALONE = "each for itself"
LIVE = "from each other"
ALONE_CHEAP = "each for itself, cheap"
LIVE_CHEAP = "from each other, cheap"
NAMES = (OFF, ALONE, LIVE, ALONE_CHEAP, LIVE_CHEAP)

SEEDED = "of a seed"
COUPLED = "coupled, a stream each"
ONE_STREAM = "coupled, one stream"

TOGETHER = (SEEDED, COUPLED)
"""Noise of samples that begin together. Those of one stream say the same then, at the same time."""
APART = (SEEDED, COUPLED, ONE_STREAM)
"""Of samples that begin one after another."""

_ROOT = b"of this benchmark"

Samples = list[list[int]]


class Cheap(SuffixDrafter):
    """Drafts at a price of its own, of all that is measured, and is not cut: its drafts bring no estimates."""

    def __init__(self, draft: DraftConfig, price: float) -> None:
        super().__init__(max_match_length=draft.max_match_length, min_match_length=draft.min_match_length)
        self._prices = np.array([price])

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        """One draft per request, in order."""
        drafts = super().propose([replace(request, prices=self._prices) for request in requests])
        return [replace(draft, probabilities=None) if len(draft.token_ids) else draft for draft in drafts]


@dataclass(slots=True)
class Answered(Tally):
    """A round of one contender. ``steps`` : passes of the target, each over all samples that run."""

    steps: int = 0
    accepted_live: int = 0


@dataclass(slots=True)
class Comparison:
    """How outputs compare with speculation off."""

    num_tokens: int = 0
    num_ties: int = 0
    num_mismatches: int = 0


class Siblings:
    """Engines with a slot for each of ``num_samples``, which differ in what they draft from alone."""

    def __init__(self, model: PreTrainedModel, codec: TextCodec, num_samples: int, args: argparse.Namespace) -> None:
        self.comparison = Comparison()
        self._num_samples = num_samples
        self._args = args
        self._codec = codec
        config = EngineConfig(max_num_seqs=num_samples, coupled_streams=num_samples)
        self._coupling = Coupling(config.coupled_streams, config.coupled_window, lambda: _ROOT)
        self._engines: dict[str, Engine] = {}
        for name in NAMES:
            draft = DraftConfig(num_speculative_tokens=args.num_speculative_tokens, live=name in (LIVE, LIVE_CHEAP))
            target = open_target(
                model,
                num_slots=num_samples,
                max_length=args.prompt_tokens + args.max_tokens + 8,
                max_draft_tokens=args.num_speculative_tokens,
                keeps_top=name != OFF and draft.recycling,
            )
            self._engines[name] = Engine(
                target,
                drafter=_drafter(name, draft, args.price),
                codec=codec,
                config=config,
                draft=draft,
                noise_root=lambda: _ROOT,
            )
            self._engines[name].warm_up()

    def round(self, prompts: Sequence[list[int]], noise: str, apart: int, number: int) -> dict[str, Answered]:
        """All prompts to every contender, in turn, who begins changing with each prompt; caches are empty at first.

        ``apart`` : passes between two samples, 0 where all begin together.
        """
        found = {name: Answered() for name in NAMES}
        with ExitStack() as stack:
            for engine in self._engines.values():
                engine.caches = stack.enter_context(CacheSet(CacheConfig(), fingerprint=self._codec.fingerprint))
            for asked, prompt in enumerate(prompts):
                first = asked % len(NAMES)
                requests = self._requests(prompt, noise, 1000 * number + asked)
                said = {
                    name: _answer(self._engines[name], requests, apart, found[name])
                    for name in NAMES[first:] + NAMES[:first]
                }
                self._compare(requests, said)
            for engine in self._engines.values():
                engine.caches = None
        return found

    def _requests(self, prompt: list[int], noise: str, seed: int) -> list[Request]:
        args = self._args
        params = SamplingParams(
            max_tokens=args.max_tokens,
            temperature=args.temperature,
            top_p=args.top_p,
            seed=seed if noise == SEEDED else None,
        )
        return [
            Request(
                request_id=f"{seed}-{sample}",
                prompt_token_ids=tuple(prompt),
                sampling=params,
                choice_index=sample,
                noise_stream=None if noise == SEEDED else sample if noise == COUPLED else 0,
            )
            for sample in range(self._num_samples)
        ]

    def _compare(self, requests: Sequence[Request], said: Mapping[str, Samples]) -> None:
        count, target = self.comparison, self._engines[OFF].target
        for name in NAMES[1:]:
            for request, got, want in zip(requests, said[name], said[OFF], strict=True):
                count.num_tokens += len(got)
                if got == want:
                    continue
                noise = self._coupling.noise_of(request, 0)
                is_tie = is_near_tie(target, request.prompt_token_ids, request.sampling, got, want, noise)
                count.num_ties += is_tie
                count.num_mismatches += not is_tie


def _drafter(name: str, draft: DraftConfig, price: float) -> Drafter:
    if name in (ALONE_CHEAP, LIVE_CHEAP):
        return Cheap(draft, price)
    return make_drafter("none" if name == OFF else "ssd", draft)


def _answer(engine: Engine, requests: Sequence[Request], apart: int, found: Answered) -> Samples:
    """What is said to requests that run together; what it took is added to ``found``."""
    waiting = list(requests)
    metrics = engine.metrics
    before = metrics.num_verify_steps, metrics.num_draft_tokens, metrics.num_accepted_tokens, _live(engine)
    answers: dict[str, list[int]] = {request.request_id: [] for request in requests}
    began, cpu = time.perf_counter(), time.process_time()
    for step in itertools.count():
        while waiting and step >= apart * (len(requests) - len(waiting)):
            engine.submit(waiting.pop(0))
        if not (waiting or engine.has_work()):
            break
        for output in engine.step():
            answers[output.request_id] += output.token_ids
        found.steps += 1
    found.seconds += time.perf_counter() - began
    found.cpu_s += time.process_time() - cpu
    found.tokens += sum(map(len, answers.values()))
    found.passes += metrics.num_verify_steps - before[0]
    found.drafted += metrics.num_draft_tokens - before[1]
    found.accepted += metrics.num_accepted_tokens - before[2]
    found.accepted_live += _live(engine) - before[3]
    return list(answers.values())


def _live(engine: Engine) -> int:
    counts = engine.metrics.by_source.get("live")
    return 0 if counts is None else counts.num_accepted_tokens


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns the exit status: 1 where an output differs by more than a near-tie."""
    args = _parse(argv)
    codec = TextCodec.load(str(args.model))
    stream = made_stream(NO_REPEATS, codec, args.prompts * args.rounds, args.seed, args.prompt_tokens)
    parameters = {
        "prompts": args.prompts,
        "max_tokens": args.max_tokens,
        "prompt_tokens": args.prompt_tokens,
        "rounds": args.rounds,
        "temperature": args.temperature,
        "top_p": args.top_p,
        "num_speculative_tokens": args.num_speculative_tokens,
        "price": args.price,
        "seed": args.seed,
        "stream": stream.checksum,
    }
    print(f"siblings: {model_name(args.model)}, {json.dumps(parameters)}")
    model = load_model(args.model, dtype=args.dtype, device=args.device)
    runs: list[dict[str, Any]] = []
    for num_samples in args.samples:
        siblings = Siblings(model, codec, num_samples, args)
        for noise, apart in [(noise, 0) for noise in TOGETHER] + [(noise, args.apart) for noise in APART]:
            siblings.comparison = Comparison()
            rounds = [
                siblings.round(stream.prompts[number :: args.rounds], noise, apart, number)
                for number in range(args.rounds)
            ]
            runs.append(_summary(num_samples, noise, apart, rounds, siblings.comparison))
            _print(runs[-1])
    result = {
        **head("siblings"),
        **model_facts(model_name(args.model), model),
        "parameters": parameters,
        "runs": runs,
    }
    line = json.dumps(result)
    if args.out is not None:
        args.out.write_text(line + "\n")
    print(line)
    return int(any(run["mismatches"] for run in runs))


def _summary(
    num_samples: int, noise: str, apart: int, rounds: Sequence[Mapping[str, Answered]], comparison: Comparison
) -> dict[str, Any]:
    def ratios(name: str, other: str) -> list[float]:
        return spread([each[name].tokens_per_s / each[other].tokens_per_s for each in rounds], 3)

    def by_cpu_time(name: str, other: str) -> list[float]:
        return spread([each[name].tokens_per_cpu_s / each[other].tokens_per_cpu_s for each in rounds], 3)

    return {
        "samples": num_samples,
        "noise": noise,
        "apart": apart,
        "compared_tokens": comparison.num_tokens,
        "ties": comparison.num_ties,
        "mismatches": comparison.num_mismatches,
        "rows": [
            {
                "drafts": name,
                "tokens_per_pass": spread([each[name].tokens_per_pass for each in rounds], 3),
                "steps": spread([each[name].steps for each in rounds], 0),
                "tokens_per_s": spread([each[name].tokens_per_s for each in rounds], 1),
                "over_off": ratios(name, OFF),
                "over_off_by_cpu_time": by_cpu_time(name, OFF),
                "drafted_per_pass": spread([each[name].drafted / each[name].passes for each in rounds], 3),
                "live_per_accepted": spread(
                    [each[name].accepted_live / max(1, each[name].accepted) for each in rounds], 3
                ),
            }
            for name in NAMES
        ],
        "live_over_alone": ratios(LIVE, ALONE),
        "live_over_alone_by_cpu_time": by_cpu_time(LIVE, ALONE),
        "live_over_alone_per_pass": spread(
            [each[LIVE_CHEAP].tokens_per_pass / each[ALONE_CHEAP].tokens_per_pass for each in rounds], 3
        ),
    }


def _print(run: dict[str, Any]) -> None:
    print(f"\n{run['samples']} samples, {run['apart']} passes apart, noise {run['noise']}: "
          f"{run['compared_tokens']} tokens compared, {run['ties']} near-ties, {run['mismatches']} mismatches; "
          "medians (least ... most) over rounds")  # fmt: skip
    titles = ("drafts", "tokens a pass", "steps", "over off", "by CPU time", "tokens/s", "drafted", "accepted: live")
    print(" ".join(f"{title:>22}" for title in titles))
    for row in run["rows"]:
        cells = (
            row["drafts"],
            _spread(row["tokens_per_pass"]),
            _spread(row["steps"], 0),
            _spread(row["over_off"]),
            _spread(row["over_off_by_cpu_time"]),
            _spread(row["tokens_per_s"], 1),
            f"{row['drafted_per_pass'][0]:.2f}",
            f"{row['live_per_accepted'][0]:.2f}",
        )
        print(" ".join(f"{cell:>22}" for cell in cells))
    print(f"{LIVE} over {ALONE}: {_spread(run['live_over_alone'], 3)}; by CPU time "
          f"{_spread(run['live_over_alone_by_cpu_time'], 3)}; tokens a pass, cheap: "
          f"{_spread(run['live_over_alone_per_pass'], 3)}", flush=True)  # fmt: skip


def _spread(values: Sequence[float], digits: int = 2) -> str:
    middle, least, most = (f"{value:.{digits}f}" for value in values)
    return f"{middle} ({least} ... {most})"


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.siblings", description=(__doc__ or "").split("\n")[0])
    add_model(parser)
    add = parser.add_argument
    add("--samples", type=_numbers, default=[4, 16, 64], help="of each prompt, together (default: 4,16,64)")
    add("--apart", type=int, default=8, help="passes between two samples (default: %(default)s)")
    add("--prompts", type=int, default=2, help="of a round (default: %(default)s)")
    add("--max-tokens", type=int, default=128, help="of each sample (default: %(default)s)")
    add("--prompt-tokens", type=int, default=320, help="prompts are cut to (default: %(default)s)")
    add("--rounds", type=int, default=3, help="(default: %(default)s)")
    add("--temperature", type=float, default=0.7, help="(default: %(default)s)")
    add("--top-p", type=float, default=0.9, help="(default: %(default)s)")
    add("--num-speculative-tokens", type=int, default=16)
    add("--price", type=float, default=0.05, help="of a drafted token where it is low (default: %(default)s)")
    add("--seed", type=int, default=0)
    add("--dtype", default="auto")
    add("--device", default="auto")
    add("--out", type=Path, help="also write the JSON line to this file")
    add("--json", action="store_true", help="accepted for symmetry: the JSON line is always the last")
    args = parser.parse_args(argv)
    if min(args.prompts, args.max_tokens, args.prompt_tokens, args.rounds, *args.samples) < 1:
        parser.error("--samples, --prompts, --max-tokens, --prompt-tokens and --rounds take numbers from 1")
    return args


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


if __name__ == "__main__":
    sys.exit(main())
