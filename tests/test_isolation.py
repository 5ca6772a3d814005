"""What one request raises inside a step ends that request with an error; the others say what they say without it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ssd.bundled import MODEL_PATH
from ssd.config import CacheConfig, DraftConfig, SamplingParams, StructuredOutput
from ssd.drafting import HybridDrafter, make_drafter
from ssd.drafting.protocol import Draft, DraftOutcome, DraftRequest, ScoredPass
from ssd.engine import Engine, FinishReason, Request
from ssd.engine.sequence import Sequence as EngineSequence
from ssd.errors import EngineBroken
from ssd.model.loading.load_target import load_model, open_target
from ssd.model.sampling import target_tokens as choosing
from ssd.model.target import Target
from ssd.retrieval.cache_manager import CacheManager
from ssd.retrieval.namespace_cache import NamespaceCache
from ssd.text.codec import TextCodec
from ssd.text.grammar import GrammarState
from tests.engines import ask, make_engine
from tests.test_namespaces import Panic, SlowSet
from tests.whole_answers import Answer, finish_all, tokens_of, whole

CODEC = TextCodec.load(str(MODEL_PATH))
POISON = "poison"
SLOTS = 4


class Failure(Exception):
    """What a library may raise."""


@cache
def target_of_all() -> Target:
    model = load_model(MODEL_PATH, dtype="float32", device="cpu")
    return open_target(model, num_slots=SLOTS, max_length=128, max_draft_tokens=4, batch_invariant="on")


def engine_of(caches: CacheManager, *, overlap: bool, shape: Any, drafter: Any = "ssd") -> Engine:
    settings: dict[str, Any] = {"max_num_seqs": SLOTS, "prefill_chunk_tokens": 24}
    target = target_of_all()
    return make_engine(drafter, target, shape=shape, caches=caches, codec=CODEC, is_asynchronous=overlap, **settings)


def all_answered(engine: Engine, requests: Sequence[Request]) -> dict[str, Answer]:
    for request in requests:
        engine.submit(request)
    return {name: whole(outputs) for name, outputs in finish_all(engine).items()}


def requests_of(grammar_for: str | None = None) -> list[Request]:
    """Greedy, sampled, with rules and with a grammar; one of them is the poisoned one."""
    asked = {
        "greedy": SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True),
        "sampled": SamplingParams(max_tokens=24, temperature=0.8, top_p=0.9, ignore_eos=True, logprobs=2),  # coupled
        POISON: SamplingParams(max_tokens=24, temperature=1.0, top_k=20, seed=5, ignore_eos=True),
        "ruled": SamplingParams(max_tokens=24, temperature=1.0, presence_penalty=1.0, seed=7, stop=("zzzz",)),
        "waiting": SamplingParams(max_tokens=12, temperature=1.0, seed=9, prompt_logprobs=1),
    }
    under_grammar = SamplingParams(max_tokens=24, seed=5, structured_output=StructuredOutput("regex", "[a-z ]{4,60}"))
    text = "import os\nfor name in names:\n    print(name)\nfor name in names:\n"
    return [
        ask(
            name,
            CODEC.encode_prompt(text if name == "greedy" else f"# {name}\n{text}"),
            params if name != grammar_for else under_grammar,
            cache_salt="own" if name == POISON else None,
        )
        for name, params in asked.items()
    ]


@cache
def undisturbed() -> dict[str, Answer]:
    with CacheManager(CacheConfig(), fingerprint=CODEC.fingerprint, inline=True) as caches:
        return all_answered(engine_of(caches, overlap=False, shape="chain"), requests_of())


def _slot_of(engine: Engine) -> int:
    """The slot of the poisoned request, -1 where it has none."""
    return next((s.slot for s in engine._scheduler.running if s.request.request_id == POISON), -1)


def _is_due(engine: Engine) -> bool:
    """After a few steps: drafts are under way, and text has been sent."""
    sequence = next((s for s in engine._scheduler.running if s.request.request_id == POISON), None)
    return sequence is not None and sequence.stats.num_output_tokens >= 5


def _chooses(engine: Engine, _logits: Any, _rows: Any, _counts: Any, params: Sequence[SamplingParams], *_: Any) -> bool:
    return any(each.top_k == 20 for each in params) and _is_due(engine)


def _spells(_engine: Engine, sequence: EngineSequence, *_: Any) -> bool:
    return sequence.request.request_id == POISON and sequence.stats.num_output_tokens >= 5


Place = tuple[Callable[[Engine], Any], str, Callable[..., bool]]
_FORWARD: Place = (
    lambda engine: engine.target,
    "forward",
    lambda engine, slots, *_: _slot_of(engine) in slots and _is_due(engine),
)
STAGES: dict[str, list[Place]] = {
    "prefill": [(lambda engine: engine.target, "prefill", lambda engine, slots, *_: _slot_of(engine) in slots)],
    "forward": [_FORWARD],
    # Alone, without drafts, it has no path to move.
    "paths": [
        (lambda engine: engine.target, "accept_paths", lambda engine, slots, *_: _slot_of(engine) in slots),
        _FORWARD,
    ],
    "choosing": [(lambda _: choosing, "host_tokens", _chooses)],
    "mask": [(lambda _: GrammarState, "_mask", lambda _, state, *__: len(state._token_ids) > 3)],
    "advance": [(lambda _: GrammarState, "advance", lambda _, state, *__: len(state._token_ids) > 5)],
    "text": [(lambda _: EngineSequence, "make_output", _spells)],
}
"""Where a fault is: whose method fails, after which calls."""


def inject(monkeypatch: pytest.MonkeyPatch, engine: Engine, stage: str, error: BaseException) -> None:
    for owner_of, name, is_faulty in STAGES[stage]:
        plain = getattr(owner_of(engine), name)

        def failing(*args: Any, plain: Any = plain, is_faulty: Any = is_faulty) -> Any:
            found = plain(*args)
            if is_faulty(engine, *args):
                raise error
            return found

        monkeypatch.setattr(owner_of(engine), name, failing)


KINDS: list[type[BaseException]] = [Failure, Panic, MemoryError]
WAYS = [("chain", False), ("chain", True), ("tree", False), ("tree", True)]
FAULTS = [
    (stage, KINDS[(number + turn) % len(KINDS)], shape, overlap)
    for number, stage in enumerate(STAGES)
    for turn, (shape, overlap) in enumerate(WAYS)
]
"""Every stage in every way to run it; each stage meets every kind, and so does each way."""


@pytest.mark.parametrize(("stage", "kind", "shape", "overlap"), FAULTS)
def test_a_fault_ends_the_request_it_belongs_to(
    monkeypatch: pytest.MonkeyPatch, stage: str, kind: type[BaseException], shape: str, overlap: bool
) -> None:
    with CacheManager(CacheConfig(), fingerprint=CODEC.fingerprint, inline=True) as caches:
        engine = engine_of(caches, overlap=overlap, shape=shape)
        inject(monkeypatch, engine, stage, kind("injected"))
        grammar_for = POISON if stage in ("mask", "advance") else None
        for request in requests_of(grammar_for):
            engine.submit(request)
        outputs = finish_all(engine)
        monkeypatch.undo()

        expected = undisturbed()
        assert {name: whole(outputs[name]) for name in expected if name != POISON} == {
            name: found for name, found in expected.items() if name != POISON
        }
        *before, last = outputs[POISON]
        assert last.finish_reason is FinishReason.ERROR and last.error is not None and "failed" in last.error
        assert all(output.finish_reason is None for output in before)
        sent = tokens_of(before)
        assert grammar_for or sent == expected[POISON].token_ids[: len(sent)]
        assert engine.metrics.num_requests_finished == {"length": 4, "error": 1}

        # The slot it had is as good as any.
        assert all_answered(engine, requests_of()) == expected
        assert engine.metrics.integrity_violations == 0


class Poisoned:
    """The usual drafter, which fails whenever it is asked for one request."""

    def __init__(self, error: BaseException) -> None:
        self._drafter = make_drafter("ssd", DraftConfig(num_speculative_tokens=4))
        self._error = error
        self.num_drafts = self.num_deaf = 0

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        if any(request.request_id == POISON for request in requests):
            raise self._error
        drafts = self._drafter.propose(requests)
        self.num_drafts += sum(len(draft.token_ids) > 0 for draft in drafts)
        return drafts

    def learn_scores(self, scored: ScoredPass) -> None:
        if POISON in scored.request_ids:
            self.num_deaf += 1
            raise self._error

    def observe(self, outcomes: Sequence[DraftOutcome], scored: ScoredPass | None = None) -> None:
        self._drafter.observe([outcome for outcome in outcomes if outcome.request_id != POISON])
        if any(outcome.request_id == POISON for outcome in outcomes):
            raise self._error

    def finish(self, request_id: str) -> None:
        self._drafter.finish(request_id)
        if request_id == POISON:
            raise self._error


@pytest.mark.parametrize("overlap", [False, True], ids=["in turn", "overlap"])
@pytest.mark.parametrize("kind", [Failure, Panic])
@pytest.mark.parametrize("several", [False, True], ids=["alone", "with another drafter"])
def test_a_fault_in_drafting_or_learning_fails_nothing_and_silences_nobody_else(
    monkeypatch: pytest.MonkeyPatch, kind: type[BaseException], several: bool, overlap: bool
) -> None:
    append = NamespaceCache.append

    def failing(cache: NamespaceCache, tokens: Any, **options: Any) -> None:
        if "# poison" in CODEC.decode(tokens.tolist()):
            raise kind("injected")
        append(cache, tokens, **options)

    monkeypatch.setattr(NamespaceCache, "append", failing)
    with CacheManager(CacheConfig(), fingerprint=CODEC.fingerprint, inline=True) as caches:
        poisoned = Poisoned(kind("injected"))
        drafter = HybridDrafter([poisoned, make_drafter("none", DraftConfig())]) if several else poisoned
        engine = engine_of(caches, overlap=overlap, shape="chain", drafter=drafter)
        assert all_answered(engine, requests_of()) == undisturbed()
        assert poisoned.num_drafts > 0 and poisoned.num_deaf > 0
        assert engine.metrics.drafter_failures > poisoned.num_deaf
        assert caches.get().stats().num_tokens > 0


def test_a_namespace_whose_directory_does_not_answer_holds_up_nobody(tmp_path: Path) -> None:
    with SlowSet(tmp_path, fingerprint=CODEC.fingerprint) as caches:
        engine = engine_of(caches, overlap=False, shape="chain")
        caches.gate.clear()
        caches.opened.clear()

        def ask(round: int) -> dict[str, Answer]:
            slow = ("greedy", POISON)
            named = [
                replace(
                    each,
                    namespace="slow" if each.request_id in slow else "default",
                    request_id=f"{each.request_id} {round}",
                )
                for each in requests_of()
            ]
            return {name.removesuffix(f" {round}"): answer for name, answer in all_answered(engine, named).items()}

        assert ask(1) == undisturbed()
        assert caches.names() == ["default"]
        assert caches.get().stats().num_appended_tokens > 0
        caches.gate.set()
        slow = caches.get("slow")
        assert slow.stats().num_appended_tokens > 2 * 24, "what ended meanwhile is learned"
        before = engine.metrics.num_accepted_tokens
        assert ask(2) == undisturbed()
        assert engine.metrics.num_accepted_tokens - before > 24
        assert threading.current_thread().name not in dict(caches.opened).values()
        assert engine.metrics.drafter_failures == 0
        engine.close()


@pytest.mark.parametrize("overlap", [False, True], ids=["in turn", "overlap"])
@pytest.mark.parametrize("kind", [Failure, Panic])
def test_a_target_that_computes_nothing_any_more_ends_the_engine(
    monkeypatch: pytest.MonkeyPatch, kind: type[BaseException], overlap: bool
) -> None:
    with CacheManager(CacheConfig(), fingerprint=CODEC.fingerprint, inline=True) as caches:
        engine = engine_of(caches, overlap=overlap, shape="chain")

        def failing(*_arguments: Any, **_options: Any) -> Any:
            raise kind("the device is gone")

        for name in ("forward", "prefill"):
            monkeypatch.setattr(engine.target, name, failing)
        with pytest.raises(EngineBroken, match="the device is gone"):
            all_answered(engine, requests_of())


@pytest.mark.parametrize(
    ("kind", "overlap"), [(KeyboardInterrupt, False), (SystemExit, False), (KeyboardInterrupt, True)]
)
@pytest.mark.parametrize("stage", ["prefill", "forward", "choosing", "text"])
def test_what_tells_the_program_to_end_is_not_contained_and_cancels_what_runs(
    monkeypatch: pytest.MonkeyPatch, stage: str, kind: type[BaseException], overlap: bool
) -> None:
    with CacheManager(CacheConfig(), fingerprint=CODEC.fingerprint, inline=True) as caches:
        engine = engine_of(caches, overlap=overlap, shape="chain")
        inject(monkeypatch, engine, stage, kind())
        with pytest.raises(kind):
            all_answered(engine, requests_of())
        monkeypatch.undo()
        ends = {name: found[-1].finish_reason for name, found in finish_all(engine).items()}
        assert ends[POISON] is FinishReason.CANCELLED
        assert set(ends.values()) <= {FinishReason.CANCELLED, FinishReason.LENGTH}
        assert all_answered(engine, requests_of()) == undisturbed()
        assert engine.metrics.integrity_violations == 0


def test_a_failed_copy_of_keys_and_values_is_computed_instead(monkeypatch: pytest.MonkeyPatch) -> None:
    with CacheManager(CacheConfig(), fingerprint=CODEC.fingerprint, inline=True) as caches:
        engine = engine_of(caches, overlap=False, shape="chain")
        copies = []

        def failing(source: int, slot: int, start: int, end: int) -> None:
            copies.append(end - start)
            raise Failure("injected")

        monkeypatch.setattr(engine.target, "_copy", failing)
        prompt = np.random.default_rng(0).integers(300, 900, 60).tolist()
        found = all_answered(engine, [ask(str(choice), prompt, choice_index=choice) for choice in range(3)])
        assert copies and found["0"] == found["1"] == found["2"]
