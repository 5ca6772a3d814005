"""A draft model: the output is what it is without one, its slots follow the text, and none is lost."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from itertools import count, product

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer, PreTrainedModel

from benchmarks.exactness import Report, Setting, compare, run
from benchmarks.workloads import snippets
from ssd.bundled import HEAD_PATH, MODEL_PATH
from ssd.config import DraftConfig, EngineConfig, SamplingParams
from ssd.drafting import Arbiter
from ssd.drafting.drafter import SuffixDrafter
from ssd.drafting.noise import SequenceNoise
from ssd.drafting.prompt_lookup import PromptLookupDrafter
from ssd.drafting.protocol import Draft, Drafter, DraftRequest, SamplingRow
from ssd.engine import Engine, Request
from ssd.errors import ConfigError, ModelError
from ssd.model.draft.model import DraftModelDrafter, load_draft_model
from ssd.model.draft.slots import READ_WIDTH
from ssd.model.loading.load_target import load_model, open_target
from ssd.model.sampling.sampler import PassOutput
from ssd.model.target import Target
from ssd.text.codec import TextCodec
from tests.models import VOCAB, tiny_model
from tests.reference.law import law_of_outputs, logits_of
from tests.statistics import assert_follows
from tests.whole_answers import Answer, answers_of

SLOTS = 8
MAX_TOKENS = 16


@cache
def codec() -> TextCodec:
    return TextCodec.load(str(MODEL_PATH))


@cache
def target() -> Target:
    return open_target(bundled(), num_slots=SLOTS, max_length=160, exact="on")


def bundled() -> PreTrainedModel:
    return load_model(MODEL_PATH, dtype="float32", device="cpu")


def noisy(model: PreTrainedModel, share: float) -> PreTrainedModel:
    """The model with noise on its weights, in proportion to their spread."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.add_(share * parameter.std() * noise)
    return model


def random_tiny(vocab_size: int) -> PreTrainedModel:
    return tiny_model("Llama", vocab_size=vocab_size, hidden_size=32, num_hidden_layers=1, max_position_embeddings=160)


@cache
def draft_target(name: str) -> Target:
    """A model to draft with; each is driven by one drafter at a time."""
    models: dict[str, Callable[[], PreTrainedModel]] = {
        "itself": bundled,
        "noisy": lambda: noisy(bundled(), 0.1),
        "random": lambda: random_tiny(codec().vocab_size),
    }
    return as_draft(models[name]())


def as_draft(model: PreTrainedModel, num_slots: int = SLOTS, max_length: int = 160) -> Target:
    return open_target(model, num_slots=num_slots, max_length=max_length, max_draft_tokens=READ_WIDTH - 1)


class WithoutEstimates:
    """A drafter whose drafts the engine never cuts: how much is verified does not depend on how fast this machine is.

    Counts what the estimates promised of the tested tokens, and what was accepted.
    """

    def __init__(self, inner: DraftModelDrafter) -> None:
        self.inner = inner
        self.promised = self.accepted = 0.0
        self.finish = inner.finish
        self._estimates: dict[str, np.ndarray] = {}

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        drafts = self.inner.propose(requests)
        for request, draft in zip(requests, drafts, strict=True):
            self._estimates[request.request_id] = np.empty(0) if draft.probabilities is None else draft.probabilities
        return [replace(draft, probabilities=None) for draft in drafts]

    def observe(self, request_id: str, draft: Draft, num_accepted: int) -> None:
        tested = min(len(draft.token_ids), num_accepted + 1)
        self.promised += self._estimates[request_id][:tested].sum()
        self.accepted += num_accepted
        self.inner.observe(request_id, draft, num_accepted)


def uncut(name: str) -> WithoutEstimates:
    return WithoutEstimates(DraftModelDrafter(draft_target(name)))


MAKERS: dict[str, Callable[[], Drafter]] = {
    "itself": lambda: uncut("itself"),
    "noisy": lambda: DraftModelDrafter(draft_target("noisy")),
    "random": lambda: uncut("random"),
    "joint": lambda: Arbiter([SuffixDrafter(), DraftModelDrafter(draft_target("noisy"))]),
}


def prompts(number: int) -> list[list[int]]:
    return [codec().encode_prompt(text)[-64:] for text in snippets(3)[:number]]


@pytest.mark.parametrize("kind", ["greedy", "sampled", "coupled"])
def test_a_draft_model_changes_no_token(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Real weights in float32; requests join as others leave. The model itself as a draft is nearly always right."""
    asked = prompts(8)
    sampling = [
        SamplingParams(max_tokens=MAX_TOKENS, temperature=0.0)
        if kind == "greedy"
        else SamplingParams(
            max_tokens=MAX_TOKENS, temperature=0.8, top_p=0.95, seed=index if kind == "sampled" else None
        )
        for index in range(len(asked))
    ]
    expected, _ = run(target(), asked, sampling, None, eos_token_ids=codec().eos_token_ids)
    report = Report()
    for setting in (
        Setting("itself", 4, 1), Setting("itself", 8, 8), Setting("noisy", 4, 4), Setting("random", 3, 8),
        Setting("joint", 8, 1), Setting("joint", 8, 4),
    ):  # fmt: skip
        compare(
            target(), asked, sampling, expected, setting,
            eos_token_ids=codec().eos_token_ids, report=report, makers=MAKERS,
        )  # fmt: skip
    with capsys.disabled():
        print(f"\n{kind}: {report}; acceptance lengths {report.acceptance}")
    assert report.passed, report.mismatches[:5]
    assert report.acceptance["itself/k4/b1"] > 3.0 > report.acceptance["random/k3/b8"]


PENALISED = [
    SamplingParams(max_tokens=12, temperature=0.9, seed=5, presence_penalty=0.7, frequency_penalty=0.4),
    SamplingParams(max_tokens=12, temperature=0.0, repetition_penalty=1.3),
    SamplingParams(max_tokens=12, temperature=1.1, top_k=20, min_p=0.02, seed=6, logit_bias=((300, 4.0),)),
    SamplingParams(max_tokens=12, temperature=0.8, seed=7, min_tokens=6, stop=("\n",)),
]


def test_penalties_bias_and_stops_apply_to_drafts_as_to_the_target() -> None:
    asked = [prompt for prompt in prompts(3) for _ in PENALISED]
    sampling = PENALISED * 3
    plain = answers(make_engine(None), asked, sampling)
    for name, least in (("noisy", 0.01), ("itself", 0.9)):
        engine = make_engine(uncut(name))
        assert answers(engine, asked, sampling) == plain
        counts = engine.metrics.by_source["model"]
        assert counts.num_accepted_tokens >= least * counts.num_draft_tokens > 0


def make_engine(drafter: Drafter | None) -> Engine:
    draft = DraftConfig(num_speculative_tokens=4 if drafter else 0)
    numbers = count()
    return Engine(
        target(),
        drafter=drafter or PromptLookupDrafter(),
        codec=codec(),
        config=EngineConfig(),
        draft=draft,
        draw_seed=lambda: next(numbers),
    )


def answers(engine: Engine, asked: Sequence[Sequence[int]], sampling: Sequence[SamplingParams]) -> list[Answer]:
    pairs = enumerate(zip(asked, sampling, strict=True))
    return answers_of(engine, [
        Request(request_id=str(index), prompt_token_ids=tuple(prompt), sampling=replace(params, logprobs=1))
        for index, (prompt, params) in pairs
    ])  # fmt: skip


# -- the law of the output -----------------------------------------------------------------------------------------

TINY_VOCAB = 6
TINY_PROMPT = (1, 3, 4)
RULED = SamplingParams(
    max_tokens=3, temperature=0.9, top_p=0.95, repetition_penalty=1.2, logit_bias=((5, 0.7),), ignore_eos=True
)


@cache
def tiny_pair() -> tuple[Target, Target, PreTrainedModel]:
    """A target, a draft model, and the target's model once more, driven by nobody."""

    def model() -> PreTrainedModel:
        return tiny_model("Llama", vocab_size=TINY_VOCAB, hidden_size=32, num_hidden_layers=1)

    return (
        open_target(model(), num_slots=16, max_length=16, max_draft_tokens=4),
        as_draft(noisy(model(), 0.5), 16, 16),
        model(),
    )


@pytest.mark.parametrize("params", [SamplingParams(max_tokens=3, ignore_eos=True), RULED], ids=["plain", "ruled"])
def test_the_engine_puts_out_the_targets_law(params: SamplingParams) -> None:
    """2,000 requests of three tokens against the exact probabilities of all outputs; no request has a seed."""
    tiny_target, tiny_draft, model = tiny_pair()

    numbers = count()
    engine = Engine(
        tiny_target,
        drafter=WithoutEstimates(DraftModelDrafter(tiny_draft, price=0.0)),
        draft=DraftConfig(num_speculative_tokens=3),
        draw_seed=lambda: next(numbers),
    )
    found = [answer for _ in range(2) for answer in answers(engine, [TINY_PROMPT] * 1000, [params] * 1000)]
    assert_follows(
        Counter(tuple(answer.token_ids) for answer in found), law_of_outputs(logits_of(model), TINY_PROMPT, params, 3)
    )
    counts = engine.metrics.by_source["model"]
    assert 0 < counts.num_accepted_tokens < counts.num_draft_tokens


# -- slots -------------------------------------------------------------------------------------------------------

TINY = as_draft(tiny_model(), num_slots=3, max_length=48)


def ask(name: str, context: Sequence[int], limit: int = 4) -> DraftRequest:
    return DraftRequest(name, np.array(context, np.int32), 1, None, limit, prices=np.zeros(1))


@cache
def reading_anew() -> Target:
    return open_target(tiny_model(), num_slots=1, max_length=48)


@torch.inference_mode()
def greedy(context: Sequence[int], num_tokens: int) -> list[int]:
    text, slots = list(context), reading_anew()
    for _ in range(num_tokens):
        slots.rollback(0, 0)
        text.append(int(slots.forward([0], np.array([text]), [len(text)]).logits[0, -1].argmax()))
    return text[len(context) :]


steps = st.lists(
    st.tuples(st.integers(0, 3), st.integers(0, 4), st.integers(1, 12), st.booleans()), min_size=1, max_size=12
)


@settings(max_examples=25)
@given(steps)
def test_a_slot_follows_whatever_becomes_of_its_drafts(script: list[tuple[int, int, int, bool]]) -> None:
    """Contexts take some of the draft and then go elsewhere, are left out of some steps, and end; the drafts are those
    of a model that reads each context anew."""
    drafter = DraftModelDrafter(TINY)
    random = np.random.default_rng(0)
    contexts = {str(name): [1 + name] for name in range(3)}
    last: dict[str, list[int]] = {}
    for who, taken, added, ends in script:
        name = str(who % 3)
        if ends:
            drafter.finish(name)
            contexts[name], last[name] = [1 + who], []
        elif len(contexts[name]) + taken + added < 40:
            contexts[name] += last.get(name, [])[:taken] + random.integers(3, VOCAB, added).tolist()
        asked = [other for other in contexts if other == name or added % 2]
        for other, draft in zip(asked, drafter.propose([ask(other, contexts[other]) for other in asked]), strict=True):
            last[other] = draft.token_ids.tolist()
            assert last[other] == greedy(contexts[other], 4)
    for name in contexts:
        drafter.finish(name)
    assert drafter.num_free_slots == 3


def test_no_slot_no_room_and_foreign_tokens_mean_no_draft() -> None:
    drafter = DraftModelDrafter(TINY)
    drafts = drafter.propose([ask(name, [5, 6]) for name in "abcd"])
    assert [len(draft.token_ids) for draft in drafts] == [4, 4, 4, 0]
    for name in "abcd":
        drafter.finish(name)
    for context, length in (([5] * 46, 2), ([5] * 48, 0), ([5] * 60, 0), ([5, VOCAB], 0), ([5, -1], 0)):
        assert len(drafter.propose([ask("a", context)])[0].token_ids) == length
        drafter.finish("a")
    assert len(drafter.propose([ask("a", [5], limit=0)])[0].token_ids) == 0
    drafter.finish("a")
    drafter.finish("never seen")
    assert drafter.num_free_slots == 3


class FailingTarget:
    """The real target, whose passes fail when told so, after they have written."""

    def __init__(self, inner: Target) -> None:
        self._inner = inner
        self.failing = False

    def __getattr__(self, name: str) -> object:
        return getattr(self._inner, name)

    def forward(self, *arguments: object) -> PassOutput:
        output = self._inner.forward(*arguments)  # type: ignore[arg-type]
        if self.failing:
            raise RuntimeError("injected")
        return output


def test_a_pass_that_fails_leaves_no_trace() -> None:
    failing = FailingTarget(TINY)
    drafter = DraftModelDrafter(failing)  # type: ignore[arg-type]
    assert drafter.propose([ask("a", [5, 6])])[0].token_ids.tolist() == greedy([5, 6], 4)
    failing.failing = True
    with pytest.raises(RuntimeError, match="injected"):
        drafter.propose([ask("a", [5, 6, 7]), ask("b", [9])])
    failing.failing = False
    for name, context in (("a", [5, 6, 7, 8]), ("b", [9, 4])):
        assert drafter.propose([ask(name, context)])[0].token_ids.tolist() == greedy(context, 4)
        drafter.finish(name)
    assert drafter.num_free_slots == 3


def test_cancelled_requests_give_their_slots_back() -> None:
    drafter = DraftModelDrafter(draft_target("noisy"))
    engine = make_engine(drafter)
    for round_, index in product(range(2), range(10)):
        engine.submit(
            Request(request_id=f"{round_}-{index}", prompt_token_ids=(5, 6, 7), sampling=SamplingParams(max_tokens=9))
        )
    for step in range(6):
        engine.step()
        engine.cancel(f"0-{step}")
        engine.cancel(f"1-{step}")
    while engine.has_work():
        engine.step()
    assert drafter.num_free_slots == SLOTS


# -- estimates ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_estimates_come_to_say_what_is_accepted(temperature: float) -> None:
    """Their sum over the tested tokens nears the number accepted."""
    drafter = uncut("noisy")
    params = [SamplingParams(max_tokens=32, temperature=temperature, seed=seed) for seed in range(16)]
    answers(make_engine(drafter), prompts(16), params)
    assert drafter.accepted > 50
    assert drafter.promised == pytest.approx(drafter.accepted, rel=0.25)


# -- loading -----------------------------------------------------------------------------------------------------


def save(model: PreTrainedModel, directory: object, more_tokens: Sequence[str] = ()) -> str:
    tokenizer = AutoTokenizer.from_pretrained(MODEL_PATH)
    tokenizer.add_tokens(list(more_tokens))
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return str(directory)


def test_an_engine_with_a_draft_model_from_files() -> None:
    engine = Engine.from_pretrained(
        MODEL_PATH,
        dtype="float32",
        device="cpu",
        config=EngineConfig(max_num_seqs=4, max_model_len=160),
        draft=DraftConfig(num_speculative_tokens=4),
        draft_model=MODEL_PATH,
    )
    engine.warm_up()
    assert answers(engine, prompts(4), PENALISED) == answers(make_engine(None), prompts(4), PENALISED)


def test_a_drafter_that_judges_no_drafts_has_none_beside_it() -> None:
    with pytest.raises(ConfigError, match='needs the drafter "ssd"'):
        Engine.from_pretrained(MODEL_PATH, drafter="prompt-lookup", draft_model=MODEL_PATH)
    with pytest.raises(ConfigError, match='needs the drafter "ssd"'):
        Engine.from_pretrained(MODEL_PATH, drafter="none", draft_head=HEAD_PATH)


@pytest.mark.parametrize(
    ("fewer", "more_tokens", "message"),
    [(0, ["<another>"], "another tokenizer"), (1, [], "do not belong together")],
)
def test_a_draft_model_of_another_vocabulary_is_refused(
    fewer: int, more_tokens: list[str], message: str, tmp_path: object
) -> None:
    directory = save(random_tiny(codec().vocab_size - fewer), tmp_path, more_tokens)
    with pytest.raises(ModelError, match=message):
        load_draft_model(directory, target(), codec())


def test_a_padded_vocabulary_and_a_shorter_context_are_fine(tmp_path: object) -> None:
    directory = save(random_tiny(codec().vocab_size + 64), tmp_path)
    drafter = load_draft_model(directory, target(), codec(), dtype="float32", device="cpu")
    sampling = SamplingRow(
        params=SamplingParams(logit_bias=((codec().vocab_size - 1, 50.0),)), noise=SequenceNoise.seeded(1)
    )
    request = DraftRequest("a", np.array([5], np.int32), 1, None, 3, prices=np.zeros(1), sampling=sampling)
    assert drafter.propose([request])[0].token_ids.max() < target().vocab_size


def test_a_recurrent_draft_model_is_refused() -> None:
    with pytest.raises(ModelError, match="recurrent"):
        DraftModelDrafter(open_target(tiny_model("Mamba"), num_slots=1, max_length=32))
