"""Our drafter in ``model.generate`` of transformers: the same tokens, in fewer passes."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    LogitsProcessor,
    PreTrainedModel,
    StaticCache,
    StoppingCriteria,
    TextStreamer,
)

from ssd.bundled import MODEL_PATH
from ssd.config import CacheConfig, DraftConfig, SamplingParams
from ssd.drafting import Draft, DraftRequest, make_drafter
from ssd.drafting.protocol import DraftOutcome, ScoredPass
from ssd.engine.sequence import namespace_secret
from ssd.errors import RequestError
from ssd.integrations.transformers import CoupledSampling, generate
from ssd.retrieval.cache_manager import CacheManager, NamespaceCache
from ssd.text.codec import TextCodec
from tests.engines import ask, make_engine, target_of
from tests.models import VOCAB, tiny_model
from tests.reference.law import law_of_outputs, logits_of
from tests.statistics import assert_follows
from tests.whole_answers import answers_of

PROMPTS = ("def main(argv):\n    parser = ", "import os\nimport sys\n\ndef walk(", "class Node:\n    def __init__(self")


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(MODEL_PATH, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def codec() -> TextCodec:
    return TextCodec.load(str(MODEL_PATH))


@pytest.fixture
def cache(codec: TextCodec) -> Iterator[NamespaceCache]:
    with CacheManager(CacheConfig(), codec.fingerprint, inline=True) as caches:
        yield caches.get()


class Counting:
    """Counts the passes of a model."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.num_passes = 0
        model.register_forward_pre_hook(self._count)

    def _count(self, *_: Any) -> None:
        self.num_passes += 1


class Failing:
    """A drafter that can do nothing."""

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        raise RuntimeError("no drafts today")

    def observe(self, outcomes: Sequence[DraftOutcome], scored: ScoredPass | None = None) -> None:
        raise RuntimeError("nor tomorrow")

    def finish(self, request_id: str) -> None:
        raise RuntimeError("never")


class EndsWith(StoppingCriteria):
    """A rule of one's own, which looks at the last token."""

    def __init__(self, token_id: int) -> None:
        self.token_id = token_id

    def __call__(self, input_ids: torch.Tensor, scores: object, **kwargs: Any) -> torch.Tensor:
        return input_ids[:, -1] == self.token_id


class Counts(LogitsProcessor):
    """A processor that counts its calls and favours another token at each."""

    def __init__(self) -> None:
        self.lengths: list[int] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.lengths.append(input_ids.shape[1])
        scores[:, (7 * len(self.lengths)) % scores.shape[1]] += 4.0  # in place, as some do
        return scores


class Grammar(LogitsProcessor):
    """Follows the output as engines of grammars do: by its last token at each call. Cannot be copied."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._state: int | None = None

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        last = int(input_ids[0, -1])
        self._state = 0 if self._state is None else (5 * self._state + last) % 11
        is_allowed = (torch.arange(scores.shape[1]) + self._state) % 3 != 0
        return scores.masked_fill(~is_allowed, float("-inf"))


def ids(codec: TextCodec, text: str) -> torch.Tensor:
    return torch.tensor([codec.encode_prompt(text)])


def test_greedy_output_is_that_of_generate(model: PreTrainedModel, codec: TextCodec, cache: NamespaceCache) -> None:
    counting = Counting(model)
    for text in PROMPTS:
        prompt = ids(codec, text)
        plain = model.generate(prompt, max_new_tokens=48, do_sample=False)
        passes = []
        for _ in range(2):
            before = counting.num_passes
            assert torch.equal(generate(model, prompt, cache=cache, max_new_tokens=48, do_sample=False), plain)
            passes.append(counting.num_passes - before)
        assert passes[1] < passes[0] <= plain.shape[1] - prompt.shape[1]
        assert passes[1] <= 8, "the second time everything is known"


@pytest.mark.parametrize("architecture", ["Llama", "Gemma 3", "Mistral (sliding window)", "GPT-2"])
def test_greedy_output_is_that_of_generate_on_other_architectures(architecture: str) -> None:
    model = tiny_model(architecture)
    prompt = torch.randint(3, 300, (1, 12), generator=torch.Generator().manual_seed(0))
    wanted = model.generate(prompt, max_new_tokens=40, do_sample=False)
    assert torch.equal(generate(model, prompt, max_new_tokens=40, do_sample=False), wanted)


STATEFUL: dict[str, Callable[[], dict[str, Any]]] = {
    "counter": lambda: {"logits_processor": [Counts()]},
    "grammar": lambda: {"logits_processor": [Grammar()]},
    "both, with a penalty": lambda: {"logits_processor": [Grammar(), Counts()], "repetition_penalty": 1.3},
    "guidance": lambda: {"guidance_scale": 1.7},
    "guidance away from a prompt": lambda: {"guidance_scale": 1.7, "negative_prompt_ids": torch.tensor([[9, 8]])},
    "none": dict,
}


@pytest.mark.parametrize("do_sample", [False, True])
@pytest.mark.parametrize("kind", STATEFUL)
def test_processors_that_keep_state_see_what_generate_shows_them(
    kind: str, do_sample: bool, cache: NamespaceCache
) -> None:
    """Drafts are right for some tokens and then wrong, so there is something to take back at nearly every step."""
    model, rules = tiny_model(), STATEFUL[kind]
    config: dict[str, Any] = {
        "max_new_tokens": 40,
        "do_sample": do_sample,
        "output_scores": True,
        "return_dict_in_generate": True,
    }
    for seed in range(8):
        prompt = torch.randint(3, 300, (1, 12), generator=torch.Generator().manual_seed(seed))
        torch.manual_seed(seed)
        first = rules()
        plain = model.generate(prompt, **config, **first)
        next_number = torch.rand(1)
        misleading = plain.sequences[0].numpy().copy()
        misleading[17::6] = (misleading[17::6] + 1) % VOCAB
        cache.append(misleading, prompt_length=12)
        torch.manual_seed(seed)
        second, counting = rules(), Counting(model)
        output = generate(model, prompt, cache=cache, learn=False, **config, **second)
        assert torch.equal(output.sequences, plain.sequences)
        assert torch.rand(1) == next_number, "as many numbers of the global generator were taken"
        assert len(output.scores) == len(plain.scores)
        for mine, wanted in zip(output.scores, plain.scores, strict=True):
            torch.testing.assert_close(mine, wanted, atol=1e-4, rtol=1e-4)
        if isinstance(counter := first.get("logits_processor", [None])[-1], Counts):
            assert second["logits_processor"][-1].lengths == counter.lengths
        assert counting.num_passes < (80 if "guidance" in kind else 40), "drafts are accepted all the same"


@pytest.mark.parametrize("is_coupled", [False, True])
def test_the_law_of_tokens_is_that_of_generate(is_coupled: bool, cache: NamespaceCache) -> None:
    """Pairs of tokens over many runs, or many secrets, with a draft that is often right; by enumeration."""
    model, drafter, prompt = tiny_model(), make_drafter("ssd", DraftConfig()), [5, 6, 7, 5, 6]
    config: dict[str, Any] = {"max_new_tokens": 2, "do_sample": True, "top_k": 4, "temperature": 0.7}
    law: Counter[tuple[int, ...]] = Counter()
    for pair, chance in law_of_outputs(logits_of(model), prompt, SamplingParams(temperature=0.7, top_k=4), 2).items():
        law[(2,) if pair[0] == 2 else pair] += chance  # type: ignore[assignment]
    for _ in range(3):
        cache.append([*prompt, *max(law, key=lambda pair: law[pair])])
    torch.manual_seed(0)
    counts: Counter[tuple[int, ...]] = Counter()
    for secret in np.random.default_rng(0).integers(0, 2**63, 250 if is_coupled else 600).tolist():
        coupled = CoupledSampling(secret, window=1) if is_coupled else None
        output = generate(
            model, torch.tensor([prompt]), cache=cache, drafter=drafter, learn=False, coupled=coupled, **config
        )
        counts[tuple(output[0, 5:].tolist())] += 1
    assert_follows(counts, law)


KINDS: list[dict[str, Any]] = [{}, {"temperature": 0.7, "top_p": 0.9}, {"top_k": 20}, {"min_p": 0.01, "top_k": 60}]


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_coupled_text_is_the_engines_own(kind: dict[str, Any], cache: NamespaceCache) -> None:
    """Short texts of a small model: no two scores are as near as rounding would need to tell them apart."""
    prompts = [(5, 6, 7, 5, 6), (9, 8), (40, 41, 42, 43, 44, 45, 46, 47, 48, 49)]
    target = target_of(max_length=128)
    engine = make_engine("ssd", target, coupled_streams=4, coupled_window=3, root=lambda: b"a root")
    said = answers_of(
        engine,
        [
            ask(str(number), prompt, max_tokens=60, noise_stream=number, **{"temperature": 1.0, **kind})
            for number, prompt in enumerate(prompts)
        ],
    )
    model, drafter = tiny_model(), make_drafter("ssd", DraftConfig())
    config = {"max_new_tokens": 60, "do_sample": True, "eos_token_id": 2, "top_k": 0, **kind}
    for number, prompt in enumerate(prompts):
        coupled = CoupledSampling(namespace_secret(b"a root", "default"), stream=number, window=3)
        for _ in range(2):  # with drafts of nothing else, and of the answer itself
            output = generate(model, torch.tensor([prompt]), cache=cache, drafter=drafter, coupled=coupled, **config)
            assert output[0, len(prompt) :].tolist() == said[number].token_ids


def test_coupled_text_does_not_depend_on_drafts_and_is_drafted_where_it_was_said(
    model: PreTrainedModel, codec: TextCodec, cache: NamespaceCache
) -> None:
    counting, coupled = Counting(model), CoupledSampling(secret=7, stream=3)
    drafter = make_drafter("ssd", DraftConfig())
    prompt = ids(codec, PROMPTS[0])
    config: dict[str, Any] = {"max_new_tokens": 48, "do_sample": True, "temperature": 0.9, "top_p": 0.95}
    alone = generate(model, prompt, drafter=Failing(), coupled=coupled, **config)
    passes = []
    for _ in range(2):
        before = counting.num_passes
        again = generate(model, prompt, cache=cache, drafter=drafter, coupled=coupled, **config)
        assert torch.equal(again, alone)
        passes.append(counting.num_passes - before)
    assert passes[1] <= 8 < passes[0], "the second time everything is known"
    other = generate(model, prompt, cache=cache, drafter=drafter, coupled=CoupledSampling(7, stream=4), **config)
    assert not torch.equal(other, alone)


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        ({"secret": 1 << 64}, "secret must be within 0.."),
        ({"secret": -1}, "secret must be within 0.."),
        ({"secret": 0, "stream": 1 << 32}, "stream must be within 0.."),
        ({"secret": 0, "window": 0}, r"window must be within 1..64, got 0"),
    ],
)
def test_coupling_by_impossible_numbers_is_refused(numbers: dict[str, int], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        CoupledSampling(**numbers)


def test_what_is_generated_is_learned_unless_told_otherwise(
    model: PreTrainedModel, codec: TextCodec, cache: NamespaceCache
) -> None:
    prompt = ids(codec, PROMPTS[0])
    generate(model, prompt, cache=cache, learn=False, max_new_tokens=8, do_sample=False)
    assert cache.snapshot().num_tokens == 0
    output = generate(model, prompt, cache=cache, max_new_tokens=8, do_sample=False)
    assert cache.stats().num_appended_tokens == output.shape[1]


def test_dictionaries_streamers_and_configurations_pass_through(
    model: PreTrainedModel, codec: TextCodec, cache: NamespaceCache, capsys: pytest.CaptureFixture[str]
) -> None:
    prompt, config = ids(codec, PROMPTS[0]), GenerationConfig(max_new_tokens=10, do_sample=False, eos_token_id=0)
    streamer = TextStreamer(AutoTokenizer.from_pretrained(MODEL_PATH), skip_prompt=True)
    output = generate(
        model,
        prompt,
        cache=cache,
        generation_config=config,
        streamer=streamer,
        return_dict_in_generate=True,
        output_scores=True,
    )
    assert len(output.scores) == output.sequences.shape[1] - prompt.shape[1] == 10
    assert capsys.readouterr().out.strip() == codec.decode(output.sequences[0, prompt.shape[1] :].tolist()).strip()


def test_max_length_is_kept(model: PreTrainedModel, codec: TextCodec, cache: NamespaceCache) -> None:
    prompt = ids(codec, PROMPTS[2])
    whole = model.generate(prompt, max_new_tokens=32, do_sample=False)
    cache.append(whole[0].numpy(), prompt_length=prompt.shape[1])
    for length in range(1, 12):
        output = generate(model, prompt, cache=cache, learn=False, max_new_tokens=length, do_sample=False)
        assert torch.equal(output, whole[:, : prompt.shape[1] + length])


@pytest.mark.parametrize("kind", ["eos_token_id", "stop_strings", "generation_config", "stopping_criteria"])
def test_output_ends_within_a_text_that_is_known_to_go_on(
    kind: str, model: PreTrainedModel, codec: TextCodec, cache: NamespaceCache
) -> None:
    prompt = ids(codec, PROMPTS[2])
    length = prompt.shape[1]
    whole = model.generate(prompt, max_new_tokens=32, do_sample=False)
    cache.append(whole[0].numpy(), prompt_length=length)
    end = int(whole[0, length + 5])
    tokenizer, said = AutoTokenizer.from_pretrained(MODEL_PATH), codec.decode([end])
    rules: dict[str, Any] = {
        "eos_token_id": {"eos_token_id": end},
        "stop_strings": {"stop_strings": said, "tokenizer": tokenizer},
        "generation_config": {"generation_config": GenerationConfig(stop_strings=[said]), "tokenizer": tokenizer},
        "stopping_criteria": {"stopping_criteria": [EndsWith(end)]},
    }[kind]
    stopped = model.generate(prompt, max_new_tokens=32, do_sample=False, **rules)
    assert length + 1 < stopped.shape[1] <= length + 6
    passes: list[torch.Tensor] = []
    with model.register_forward_pre_hook(lambda *called: passes.append(called[2]["input_ids"]), with_kwargs=True):
        output = generate(model, prompt, cache=cache, max_new_tokens=32, do_sample=False, **rules)
    assert torch.equal(output, stopped)
    [fed] = passes  # the prompt, with the draft up to what ends it, which is left to the model
    assert fed.shape[1] == stopped.shape[1] - 1 and end not in fed[0, length:]
    assert cache.stats().num_appended_tokens == whole.shape[1] + stopped.shape[1]


def test_ids_that_the_model_has_not_are_not_drafted(cache: NamespaceCache) -> None:
    model, prompt = tiny_model(), torch.tensor([[5, 6, 7]])
    cache.append([5, 6, 7, VOCAB, VOCAB + 1, 8])
    wanted = model.generate(prompt, max_new_tokens=8, do_sample=False)
    assert torch.equal(generate(model, prompt, cache=cache, max_new_tokens=8, do_sample=False), wanted)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"num_beams": 4}, "num_beams must be 1"),
        ({"num_return_sequences": 2, "do_sample": True}, "num_return_sequences must be 1"),
        ({"prompt_lookup_num_tokens": 5}, "prompt_lookup_num_tokens makes drafts of its own"),
        ({"coupled": CoupledSampling(1), "do_sample": False}, "pass do_sample=True"),
        ({"inputs": torch.ones(2, 3, dtype=torch.long)}, r"one prompt of shape \[1, n\], got \[2, 3\]"),
        ({"model": "Mamba"}, "cannot remove tokens from its state"),
        ({"use_cache": False}, "with use_cache=False, rejected draft tokens cannot be removed: omit use_cache"),
        (
            {"generation_config": GenerationConfig(use_cache=False)},
            "with use_cache=False, rejected draft tokens cannot be removed",
        ),
        ({"cache_implementation": "static"}, "with StaticCache, .* cannot be removed: omit cache_implementation"),
        ({"past_key_values": StaticCache}, "with StaticCache, rejected draft tokens cannot be removed"),
    ],
)
def test_what_cannot_be_drafted_for_is_refused(kwargs: dict[str, Any], message: str) -> None:
    asked = {
        "inputs": torch.tensor([[5, 6]]),
        "max_new_tokens": 2,
        **kwargs,
        "model": tiny_model(kwargs.get("model", "Llama")),
    }
    if "past_key_values" in asked:
        asked["past_key_values"] = StaticCache(config=asked["model"].config, max_cache_len=64)
    with pytest.raises(RequestError, match=message):
        generate(asked.pop("model"), asked.pop("inputs"), **asked)
