"""Compare the outputs of engines with the outputs of plain decoding: tokens and log-probabilities must be equal.

Near-ties are tolerated only against transformers' ``generate`` and for targets that are not batch-invariant. In both
cases, two computations for the same tokens round differently, so another token may be chosen if the two best scores,
including sampling noise, differ by less than ``TIE_MARGIN``. `is_near_tie` decides this.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
import torch

from ssd.config import CacheConfig, DraftConfig, EngineConfig, SamplingParams
from ssd.drafting import make_drafter
from ssd.drafting.noise import SequenceNoise
from ssd.drafting.protocol import Draft, Drafter, DraftRequest, NoDrafter
from ssd.engine import Engine, Request
from ssd.engine.sequence import namespace_secret
from ssd.model.runners.slot_runner import SlotRunner
from ssd.model.sampling.sampler import TokenLogprobs, gumbel_noise
from ssd.model.sampling.target_tokens import truncated_scores
from ssd.model.target import Target
from ssd.retrieval.cache_manager import CacheManager

TIE_MARGIN = 1e-4
NUM_TOP = 2
"""The number of most probable tokens per position whose log-probabilities are compared."""

_COUPLED = EngineConfig(coupled_streams=1, coupled_window=2)
"""Coupled sampling for requests without a seed: one noise stream, and noise that depends on the last two tokens only,
so that the same noise recurs often."""
_ROOT = b"of all comparisons"

Makers = Mapping[str, Callable[[], Drafter]]
"""Functions that create further drafters, by the drafter name in a `Setting`. Each run creates a new drafter."""


class RandomDrafter(NoDrafter):
    """A worst-case drafter: drafts random tokens, always as many as allowed."""

    def __init__(self, vocab_size: int, seed: int = 0) -> None:
        self._vocab_size = vocab_size
        self._random = np.random.default_rng(seed)

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        """Draft random tokens for every request."""
        return [
            Draft(self._random.integers(0, self._vocab_size, max(0, r.limit), np.int32), source="random")
            for r in requests
        ]


class OracleDrafter(RandomDrafter):
    """A drafter that drafts the known answer to each prompt. The last token of every third draft is made wrong."""

    def __init__(self, answers: Mapping[tuple[int, ...], Sequence[int]], vocab_size: int) -> None:
        super().__init__(vocab_size)
        self._answers = answers
        self._calls = 0

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        """Draft the next tokens of the known answer, assuming that the output so far equals it."""
        drafts = []
        for request in requests:
            self._calls += 1
            prompt = tuple(request.context[: request.prompt_length].tolist())
            done = len(request.context) - request.prompt_length
            tokens = np.array(self._answers.get(prompt, ())[done : done + max(0, request.limit)], np.int32)
            if len(tokens) and self._calls % 3 == 0:
                tokens[-1] = (tokens[-1] + 1) % self._vocab_size
            drafts.append(Draft(tokens, source="oracle"))
        return drafts


class Said(NamedTuple):
    """The output of one request. ``logprobs`` is None if the request did not ask for log-probabilities."""

    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None = None


@dataclass(frozen=True, slots=True)
class Setting:
    """A combination of drafter, draft limit and batch size to test."""

    drafter: str
    num_speculative_tokens: int
    batch_size: int

    def __str__(self) -> str:
        return f"{self.drafter}/k{self.num_speculative_tokens}/b{self.batch_size}"


def covering_settings(
    drafters: Sequence[str], draft_limits: Sequence[int], batch_sizes: Sequence[int]
) -> list[Setting]:
    """Choose few settings in which every pair of values of two parameters occurs (greedy pairwise testing)."""
    candidates = [Setting(*values) for values in itertools.product(drafters, draft_limits, batch_sizes)]

    def pairs(s: Setting) -> set[tuple[object, ...]]:
        return {
            ("dk", s.drafter, s.num_speculative_tokens),
            ("db", s.drafter, s.batch_size),
            ("kb", s.num_speculative_tokens, s.batch_size),
        }

    missing = set().union(*map(pairs, candidates))
    chosen: list[Setting] = []
    while missing:
        best = max(candidates, key=lambda s: len(pairs(s) & missing))
        chosen.append(best)
        missing -= pairs(best)
    return chosen


@dataclass(slots=True)
class Report:
    """The result of comparing outputs with those of plain decoding."""

    num_distinct: int = 0
    """The number of tokens in the expected outputs; the caller counts them."""
    num_tokens: int = 0
    """The number of token comparisons. A token that several settings generate counts once for each setting."""
    num_logprobs: int = 0
    """The number of positions at which log-probabilities were compared too."""
    num_ties: int = 0
    """The number of outputs that differ at a near-tie. Their remaining tokens are not compared."""
    mismatches: list[str] = field(default_factory=list)
    acceptance: dict[str, float] = field(default_factory=dict)
    """The mean acceptance length of each setting."""

    @property
    def passed(self) -> bool:
        """Whether there is no mismatch and at most one near-tie per 10,000 tokens (rounded up)."""
        return not self.mismatches and self.num_ties <= -(-self.num_tokens // 10_000)

    def __str__(self) -> str:
        ties = f", {self.num_ties} near-ties" if self.num_ties else ""
        return (
            f"{self.num_tokens} tokens compared, {self.num_logprobs} with log-probabilities{ties}, "
            f"{len(self.mismatches)} mismatches"
        )


def run(
    target: Target,
    prompts: Sequence[Sequence[int]],
    sampling: Sequence[SamplingParams],
    setting: Setting | None,
    *,
    eos_token_ids: Iterable[int],
    answers: Mapping[tuple[int, ...], Sequence[int]] | None = None,
    makers: Makers | None = None,
) -> tuple[list[Said], float]:
    """Generate all outputs with a new engine over ``target``; return them and the mean acceptance length.

    With a ``setting``, the engine drafts, ``batch_size`` requests run at a time, and every second one asks for
    log-probabilities. Without, speculation is off, one request runs at a time, and all ask for them. Requests without a
    seed use coupled sampling with a fixed secret, so that all runs have the same noise.
    """
    batch_size = setting.batch_size if setting else 1
    draft = DraftConfig(num_speculative_tokens=setting.num_speculative_tokens if setting else 0)
    own: Makers = {
        "random": lambda: RandomDrafter(target.vocab_size),
        "oracle": lambda: OracleDrafter(answers or {}, target.vocab_size),
        **(makers or {}),
    }
    name = "none" if setting is None else setting.drafter
    drafter = own[name]() if name in own else make_drafter(name, draft)
    with CacheManager(CacheConfig(), fingerprint="0" * 32, inline=True) as caches:
        engine = Engine(
            target,
            drafter=drafter,
            caches=caches,
            config=_COUPLED,
            draft=draft,
            eos_token_ids=eos_token_ids,
            noise_root=lambda: _ROOT,
        )
        asked = [setting is None or index % 2 == 0 for index in range(len(prompts))]
        outputs = [Said([], [] if asks else None) for asks in asked]
        pending = list(range(len(prompts)))[::-1]
        in_flight = 0
        while pending or in_flight:
            while pending and in_flight < batch_size:
                index = pending.pop()
                params = replace(sampling[index], logprobs=NUM_TOP) if asked[index] else sampling[index]
                engine.submit(Request(request_id=str(index), prompt_token_ids=tuple(prompts[index]), sampling=params))
                in_flight += 1
            for output in engine.step():
                said = outputs[int(output.request_id)]
                said.token_ids.extend(output.token_ids)
                if said.logprobs is not None:
                    said.logprobs.extend(output.logprobs or ())
                in_flight -= output.finish_reason is not None
        return outputs, engine.metrics.mean_acceptance_length


def compare(
    target: Target,
    prompts: Sequence[Sequence[int]],
    sampling: Sequence[SamplingParams],
    expected: Sequence[Said],
    setting: Setting,
    *,
    eos_token_ids: Iterable[int],
    report: Report,
    makers: Makers | None = None,
) -> None:
    """Run ``setting`` and add to ``report`` how its outputs differ from ``expected``.

    If ``expected`` comes from `run` and the target is batch-invariant, tokens and log-probabilities must be equal.
    Otherwise, as with `reference_greedy`, tokens are compared up to the first near-tie.
    """
    answers = {tuple(p): e.token_ids for p, e in zip(prompts, expected, strict=True)}
    outputs, acceptance = run(
        target, prompts, sampling, setting, eos_token_ids=eos_token_ids, answers=answers, makers=makers
    )
    report.acceptance.setdefault(str(setting), acceptance)
    for index, (found, wanted) in enumerate(zip(outputs, expected, strict=True)):
        is_exact = target.batch_invariance.is_invariant and wanted.logprobs is not None
        ours, theirs = ((each if is_exact else None) for each in (found.logprobs, wanted.logprobs))
        place = first_difference(found.token_ids, wanted.token_ids)
        report.num_tokens += len(wanted.token_ids) if place is None else place + 1
        report.num_logprobs += len(ours or ())
        if place is None and ours is not None and ours != theirs:
            pair = next((pair for pair in zip(ours, theirs or (), strict=False) if pair[0] != pair[1]), None)
            report.mismatches.append(f"{setting}: prompt {index}, log-probabilities {pair}")
        elif place is not None:
            if not is_exact and is_near_tie(target, prompts[index], sampling[index], found.token_ids, wanted.token_ids):
                report.num_ties += 1
            else:
                report.mismatches.append(f"{setting}: prompt {index}, token {place}")


def first_difference(got: Sequence[int], want: Sequence[int]) -> int | None:
    """Return the index of the first different token, None for equal outputs; a shorter output differs at its end."""
    if list(got) == list(want):
        return None
    return next((t for t, (a, b) in enumerate(zip(got, want, strict=False)) if a != b), min(len(got), len(want)))


def differs(
    target: Target, prompt: Sequence[int], params: SamplingParams, got: Sequence[int], want: Sequence[int]
) -> bool:
    """Return whether an output is wrong: not equal to plain decoding's output ``want``.

    If passes are not batch-invariant, an output that first differs at a near-tie is not wrong.
    """
    if list(got) == list(want):
        return False
    return target.batch_invariance.is_invariant or not is_near_tie(target, prompt, params, got, want)


@torch.inference_mode()
def is_near_tie(
    target: Target,
    prompt: Sequence[int],
    params: SamplingParams,
    got: Sequence[int],
    want: Sequence[int],
    margin: float = TIE_MARGIN,
) -> bool:
    """Return whether two outputs first differ at a near-tie: the two best scores differ by less than ``margin``."""
    return gap_at_difference(target, prompt, params, got, want) < margin


def gap_at_difference(
    target: Target, prompt: Sequence[int], params: SamplingParams, got: Sequence[int], want: Sequence[int]
) -> float:
    """Return by how much the two best scores differ where two outputs first differ; infinity if one output is longer.

    The scores are recomputed after the prompt and the common tokens. They include the sampling noise; for requests
    without a seed, it is the noise of `run`.
    """
    place = first_difference(got, want)
    if place is None or place >= min(len(got), len(want)):
        return math.inf
    context = [*prompt, *want[:place]]
    target.rollback(0, 0)
    logits = target.forward([0], np.array([context], np.int64), [len(context)]).logits[0, -1:].float()
    target.rollback(0, 0)
    scores = logits.double()
    if not params.greedy:
        keys = _noise_of(params).keys(np.array(context, np.int32))
        drawn = gumbel_noise(torch.from_numpy(keys.view(np.int64)).to(logits.device), logits.shape[-1])
        scores = truncated_scores(logits, [params]).double() + drawn
    best = torch.topk(scores[0], 2).values
    return float(best[0] - best[1])


def _noise_of(params: SamplingParams) -> SequenceNoise:
    if params.seed is not None:
        return SequenceNoise.seeded(params.seed)
    return SequenceNoise.coupled(namespace_secret(_ROOT, "default"), 0, _COUPLED.coupled_window)


def reference_greedy(
    target: Target, prompts: Sequence[Sequence[int]], max_tokens: int, eos_token_ids: Iterable[int]
) -> list[Said]:
    """Generate greedily with transformers' ``model.generate`` and its own attention, one prompt at a time."""
    model = target.model
    ours = model.config._attn_implementation
    if isinstance(target, SlotRunner):
        model.set_attn_implementation("sdpa" if getattr(model, "_supports_sdpa", False) else "eager")
    eos = list(eos_token_ids)
    outputs = []
    for prompt in prompts:
        ids = torch.tensor([list(prompt)], device=target.device)
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=max_tokens,
            do_sample=False,
            repetition_penalty=1.0,
            eos_token_id=eos or None,
            pad_token_id=eos[0] if eos else 0,
            temperature=None,
            top_p=None,
            top_k=None,
        )
        outputs.append(Said(out[0, len(prompt) :].tolist()))
    model.set_attn_implementation(ours)
    return outputs
