"""Engines compared with plain decoding: tokens and log-probabilities, by ``==``.

Near-ties are let pass in one place, `is_near_tie`, and only where the arithmetic is not ours or not exact: against
``generate`` of transformers, and with targets that are not batch-invariant. There two passes over the same tokens
round differently, and where the two best scores, noise included, are within ``TIE_MARGIN`` another token may be chosen.
"""

from __future__ import annotations

import itertools
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
"""Of the most probable tokens whose log-probabilities are compared."""

_COUPLED = EngineConfig(coupled_streams=1, coupled_window=2)
"""Requests without a seed share one stream; the window is short, so that what a key depends on comes again."""
_ROOT = b"of all comparisons"

Makers = Mapping[str, Callable[[], Drafter]]
"""Drafters that a setting may name beside the project's own: each run gets a fresh one."""


class RandomDrafter(NoDrafter):
    """Adversarial: drafts of random tokens, always as long as allowed."""

    def __init__(self, vocab_size: int, seed: int = 0) -> None:
        self._vocab_size = vocab_size
        self._random = np.random.default_rng(seed)

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        """Random tokens for every request."""
        return [
            Draft(self._random.integers(0, self._vocab_size, max(0, r.limit), np.int32), source="random")
            for r in requests
        ]


class OracleDrafter(RandomDrafter):
    """Knows each prompt's answer and drafts it; every third draft has its last token spoilt."""

    def __init__(self, answers: Mapping[tuple[int, ...], Sequence[int]], vocab_size: int) -> None:
        super().__init__(vocab_size)
        self._answers = answers
        self._calls = 0

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        """The rest of the answer where the context agrees with it."""
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
    """One output; ``logprobs`` are None where none were asked for."""

    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None = None


@dataclass(frozen=True, slots=True)
class Setting:
    """One way to run the engine."""

    drafter: str
    num_speculative_tokens: int
    batch_size: int

    def __str__(self) -> str:
        return f"{self.drafter}/k{self.num_speculative_tokens}/b{self.batch_size}"


def covering_settings(
    drafters: Sequence[str], draft_limits: Sequence[int], batch_sizes: Sequence[int]
) -> list[Setting]:
    """Few settings in which every pair of values of two dimensions occurs together at least once (greedily chosen)."""
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
    """Outcome of a comparison."""

    num_distinct: int = 0
    """Tokens of the outputs that others are compared with; who makes them counts them."""
    num_tokens: int = 0
    """Compared, a text in every setting."""
    num_logprobs: int = 0
    """Of these tokens, those whose log-probabilities were compared too."""
    num_ties: int = 0
    """Near-ties, each of which ended the comparison of its output."""
    mismatches: list[str] = field(default_factory=list)
    acceptance: dict[str, float] = field(default_factory=dict)
    """Mean acceptance length by setting."""

    @property
    def passed(self) -> bool:
        """No mismatch, and at most one tie per 10,000 tokens (rounded up)."""
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
    """Outputs of a fresh engine over ``target``, ``batch_size`` requests at a time, and the mean acceptance length.

    ``setting`` None is the engine without speculation, one request at a time, all of which ask for log-probabilities;
    else every second one does. What is sampled without a seed is coupled, with a secret that is always the same.
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

    ``expected`` : of `run`, tokens and log-probabilities; or of `reference_greedy`, tokens up to the first near-tie, as
    with targets that are not exact.
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
    """Where two outputs part, the end of the shorter included; None where they are equal."""
    if list(got) == list(want):
        return None
    return next((t for t, (a, b) in enumerate(zip(got, want, strict=False)) if a != b), min(len(got), len(want)))


def differs(
    target: Target, prompt: Sequence[int], params: SamplingParams, got: Sequence[int], want: Sequence[int]
) -> bool:
    """Whether an output is not what plain decoding said: at all; of a target that is not exact, but for a near-tie."""
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
    """Whether two outputs that differ, ``want`` of plain decoding, first do so where its best two scores are near.

    What has no seed was sampled with the noise of `run`.
    """
    place = first_difference(got, want)
    if place is None or place >= min(len(got), len(want)):
        return False
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
    return float(best[0] - best[1]) < margin


def _noise_of(params: SamplingParams) -> SequenceNoise:
    if params.seed is not None:
        return SequenceNoise.seeded(params.seed)
    return SequenceNoise.coupled(namespace_secret(_ROOT, "default"), 0, _COUPLED.coupled_window)


def reference_greedy(
    target: Target, prompts: Sequence[Sequence[int]], max_tokens: int, eos_token_ids: Iterable[int]
) -> list[Said]:
    """Plain ``model.generate`` of transformers, greedy, one prompt at a time, on the model's own attention."""
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
