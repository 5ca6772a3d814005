"""Structured output: what comes out fits, speculation or not, and drafts leave no trace in the grammar's state."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from benchmarks.exactness import OracleDrafter, RandomDrafter
from ssd.bundled import MODEL_PATH
from ssd.config import SamplingParams, StructuredOutput
from ssd.drafting.protocol import Drafter
from ssd.engine import Engine, FinishReason
from ssd.errors import RequestError
from ssd.model.loading.load_target import load_model, open_target
from ssd.text import grammar
from ssd.text.codec import TextCodec
from ssd.text.grammar import GrammarState
from ssd.text.grammar_compiler import GrammarCompiler
from ssd.text.grammar_memory import GrammarMemory
from tests.engines import ask, make_engine
from tests.models import tiny_model
from tests.tokenizers_for_tests import byte_level_tokenizer, real_tokenizers, sentencepiece_like_tokenizer
from tests.waiting import PATIENCE_S, wait_until
from tests.whole_answers import Answer, finish_all, tokens_of, whole

CODEC = TextCodec.load(str(MODEL_PATH))
EOS = CODEC.eos_token_ids[0]
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "size": {"type": "integer", "minimum": 0, "maximum": 99},
        "tags": {"type": "array", "items": {"enum": ["a", "b\u00e9"]}, "maxItems": 2},
    },
    "required": ["name", "size", "tags"],
    "additionalProperties": False,
}
BRANCHES = {  # keys of different values, of which a draft may try the wrong one
    "type": "object",
    "properties": {
        "kind": {"const": "inner"},
        "size": {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 0.05},
    },
    "required": ["size"],
}
OUTPUTS = {
    "json_object": StructuredOutput("json_object"),
    "json_schema": StructuredOutput("json_schema", json.dumps(SCHEMA)),
    "branches": StructuredOutput("json_schema", json.dumps(BRANCHES)),
    "regex": StructuredOutput("regex", r"[a-c]{2,5}(-[0-9]{1,3}){2}"),
    "choice": StructuredOutput("choice", json.dumps(["yes", 'it is "no"\n', "n\u00e9"])),
    "too complex": StructuredOutput("regex", "(a{1,5000}){1,5000}"),
    "grammar": StructuredOutput("grammar", 'start: "<" body ">"\nbody: /[a-z]{1,8}/ | start'),
    "parts": StructuredOutput.parts(
        'start: "(" (@word | @size | @inner) ")"',
        {
            "word": StructuredOutput("choice", '["yes", "no"]'),
            "size": StructuredOutput("json_schema", '{"type": "integer", "minimum": 0, "maximum": 99}'),
            "inner": StructuredOutput("grammar", 'start: "<" WORD ">"\nWORD: /[a-z]{1,8}/'),
        },
        "tools",
    ),
}


def fits(kind: str, text: str) -> bool:
    """By other means than the grammar's own."""
    if kind == "too complex":  # ends wherever the library gives up
        return set(text) <= {"a"}
    if kind == "parts":
        return re.fullmatch(r"\((yes|no|[1-9]?[0-9]|<[a-z]{1,8}>)\)", text) is not None
    if kind == "json_object":
        return isinstance(json.loads(text), dict)
    if kind == "branches":
        return 0 < json.loads(text)["size"] < 0.05
    if kind == "json_schema":
        found = json.loads(text)
        return (
            sorted(found) == ["name", "size", "tags"]
            and isinstance(found["name"], str)
            and len(found["name"]) <= 6
            and isinstance(found["size"], int)
            and 0 <= found["size"] <= 99
            and len(found["tags"]) <= 2
            and set(found["tags"]) <= {"a", "b\u00e9"}
        )
    if kind == "regex":
        return re.fullmatch(OUTPUTS["regex"].source, text) is not None
    if kind == "choice":
        return text in json.loads(OUTPUTS["choice"].source)
    return re.fullmatch(r"(<+)[a-z]{1,8}(>+)", text) is not None and text.count("<") == text.count(">")


# -- the state -------------------------------------------------------------------------------------------------------


def compiler() -> GrammarCompiler:
    pytest.importorskip("llguidance")
    return GrammarCompiler(CODEC, vocab_size=CODEC.vocab_size + 5, eos_token_ids=CODEC.eos_token_ids)


@settings(max_examples=60)
@given(st.sampled_from(sorted(OUTPUTS)), st.integers(0, 1000), st.lists(st.integers(0, 3), max_size=12))
def test_masks_along_a_draft_are_those_of_each_prefix_alone(kind: str, seed: int, choices: list[int]) -> None:
    """The slow twin: a new state for every prefix, advanced token by token. Drafts are partly refused."""
    made = compiler()
    random = np.random.default_rng(seed)
    state = made.compile(OUTPUTS[kind])
    output: list[int] = []
    draft: list[int] = []
    for choice in choices:  # 0: commit the draft so far; else draft one more token, mostly an allowed one
        if choice == 0:
            valid = len(state.masks(draft)) - 1
            state.advance(draft[:valid])
            output, draft = output + draft[:valid], []
        else:
            allowed = np.flatnonzero(state.masks(draft)[-1])
            draft.append(int(random.choice(allowed)) if choice > 1 else int(random.integers(CODEC.vocab_size)))
    masks = state.masks(draft)
    for t in range(len(draft) + 1):
        twin = made.compile(OUTPUTS[kind])
        for token in output + draft[:t]:
            twin.advance([token])
        (expected,) = twin.masks([])
        assert expected.any() and len(expected) == CODEC.vocab_size + 5
        assert np.array_equal(masks[t], expected)
        if t < len(draft) and not expected[draft[t]]:
            assert len(masks) == t + 1
            break
    else:
        assert len(masks) == len(draft) + 1


def test_other_tokenizers() -> None:
    pytest.importorskip("llguidance")
    codecs = [TextCodec(PreTrainedTokenizerFast(tokenizer_object=byte_level_tokenizer()), (0,))]
    codecs += [TextCodec.load(str(path)) for path in real_tokenizers()]
    random = np.random.default_rng(0)
    for codec in codecs:
        if not codec.eos_token_ids:
            continue
        made = GrammarCompiler(codec, vocab_size=codec.vocab_size, eos_token_ids=codec.eos_token_ids)
        for _ in range(5):
            state = made.compile(StructuredOutput("regex", "(ab|a|c)\u00e9 d\n"))
            token_ids: list[int] = []
            while not set(token_ids) & set(codec.eos_token_ids):
                (mask,) = state.masks([])
                token_ids.append(int(random.choice(np.flatnonzero(mask))))
                state.advance(token_ids[-1:])
            assert codec.decode(token_ids[:-1]) in ("ab\u00e9 d\n", "a\u00e9 d\n", "c\u00e9 d\n")


@pytest.mark.filterwarnings("ignore")
def test_a_tokenizer_that_the_library_cannot_read_is_a_refusal() -> None:
    pytest.importorskip("llguidance")
    codec = TextCodec(PreTrainedTokenizerFast(tokenizer_object=sentencepiece_like_tokenizer()), (2,))
    with pytest.raises(RequestError, match="llguidance"):
        GrammarCompiler(codec, vocab_size=codec.vocab_size, eos_token_ids=(2,)).compile(StructuredOutput("json_object"))


@pytest.mark.parametrize(
    ("kind", "source"),
    [
        ("json_schema", "{"),
        ("json_schema", '{"type": "nothing"}'),
        ("json_schema", "3"),
        ("json_schema", "[]"),
        ("json_schema", '{"$ref": "#/nowhere"}'),
        ("regex", "(["),
        ("choice", "[]"),
        ("choice", '[""]'),
        ("grammar", "start: x"),
        ("grammar", ""),
        ("grammar", "start: x " + '"' + "y" * 5000 + '"'),
    ],
)
def test_what_cannot_be_compiled_is_refused_by_the_clients_name(kind: Any, source: str) -> None:
    with pytest.raises(RequestError) as caught:
        compiler().compile(StructuredOutput(kind, source, "guided_thing"))
    assert caught.value.param == "guided_thing"
    said = str(caught.value)
    assert "guided_thing" in said and len(said) < 400 and "\n" not in said


def test_without_the_extra_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    made = GrammarCompiler(CODEC, vocab_size=CODEC.vocab_size, eos_token_ids=CODEC.eos_token_ids)
    with pytest.raises(RequestError, match=r"pip install 'ssd-serving\[structured\]'") as caught:
        made.compile(StructuredOutput("json_object", param="response_format"))
    assert caught.value.param == "response_format"


def too_complex(num_ways: int = 2100) -> StructuredOutput:
    """After its first five letters there are more ways to go on than llguidance follows."""
    ways = [f'w{way}: "x" "y{way}"' for way in range(num_ways)]
    rules = f'start: "a" "bcde" ({"|".join(f"w{way}" for way in range(num_ways))})'
    return StructuredOutput("grammar", "\n".join([rules, *ways]), "guided_grammar")


@pytest.mark.parametrize("rule", ['x x | "a"', 'x x x | x x | "a"'])
def test_an_ambiguous_grammar_ends_before_its_steps_become_long(rule: str) -> None:
    state = compiler().compile(StructuredOutput("grammar", f"start: x\nx: {rule}", "guided_grammar"))
    (letter,) = CODEC.encode_completion("a")
    for _ in range(1000):
        if not state.masks([])[0][letter]:
            break
        state.advance([letter])
    else:
        pytest.fail("it goes on")
    with pytest.raises(RequestError, match="too complex"):
        state.advance([CODEC.eos_token_ids[0]])


def test_a_draft_of_another_branch_leaves_no_trace_in_later_masks() -> None:
    """By the tokens with which llguidance's own rollback gave the masks of the branch that was tried first."""
    made = compiler()
    state, twin = made.compile(OUTPUTS["branches"]), made.compile(OUTPUTS["branches"])
    begin, wrong, right = ([*map(int, CODEC.encode_completion(text))] for text in ("{", '"kind": "in', '"size":'))
    state.masks(begin)
    state.advance(begin)
    assert len(state.masks(wrong)) == len(wrong) + 1
    state.advance(right[:2])
    masks = state.masks(right[2:])
    twin.advance([*begin, *right])
    assert np.array_equal(masks[-1], twin.masks([])[0])


# -- the engine ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def target() -> Any:
    model = load_model(MODEL_PATH, dtype="float32", device="cpu")
    return open_target(model, num_slots=2, max_length=192, max_draft_tokens=8, batch_invariant="on")


def output_of(
    target: Any, drafter: Drafter | str, prompt: Sequence[int], sampling: SamplingParams, k: int
) -> tuple[Answer, int]:
    """The answer, and how many passes it took."""
    engine = make_engine(drafter, target, limit=k, codec=CODEC)
    for name, params in (("a", sampling), ("free", replace(sampling, structured_output=None, max_tokens=9))):
        engine.submit(ask(name, prompt, params))
    outputs = finish_all(engine)["a"]
    return whole(outputs), outputs[-1].stats.num_verify_steps


@pytest.mark.parametrize("kind", sorted(OUTPUTS))
@pytest.mark.parametrize("temperature", [0.0, 1.3])
def test_structured_output_fits_and_speculation_changes_no_token(
    target: Any, kind: str, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("llguidance")
    monkeypatch.setattr(grammar, "PATIENCE_S", PATIENCE_S)  # a late mask would cost a draft
    for seed in (0, None):  # without one: coupled
        prompt = CODEC.encode_prompt(f"def f{seed}(a):\n    return")
        sampling = SamplingParams(
            max_tokens=60, temperature=temperature, seed=seed, structured_output=OUTPUTS[kind], logprobs=2
        )
        plain, steps = output_of(target, "none", prompt, sampling, 0)
        assert (plain.token_ids[-1] == EOS) == (plain.finish_reason is FinishReason.STOP)
        if plain.finish_reason is FinishReason.STOP:
            assert fits(kind, plain.text), plain.text
        known = {tuple(prompt): [*plain.token_ids, EOS, 5]}
        drafters: list[Drafter | str] = [OracleDrafter(known, CODEC.vocab_size), RandomDrafter(CODEC.vocab_size), "ssd"]
        for drafter in drafters:
            found, fewer = output_of(target, drafter, prompt, sampling, 8)
            assert found == plain
            if drafter is drafters[0] and len(plain.token_ids) > 2:
                assert fewer < steps


def test_weaker_rules_give_way_to_the_grammar(target: Any) -> None:
    pytest.importorskip("llguidance")
    yes = CODEC.encode_completion("yes")
    sampling = SamplingParams(
        max_tokens=8,
        temperature=0.0,
        min_tokens=8,
        allowed_token_ids=(7,),
        bad_words=(tuple(yes),),
        structured_output=StructuredOutput("choice", '["yes"]'),
    )
    found, _ = output_of(target, "none", CODEC.encode_prompt("x"), sampling, 0)
    assert (found.text, found.finish_reason) == ("yes", FinishReason.STOP)


def test_a_grammar_as_deep_as_it_is_long_ends_no_process() -> None:
    chain = "start: a0\n" + "".join(f'a{rule}: "x" a{rule + 1}\n' for rule in range(4500)) + 'a4500: "y"\n'
    compiler().compile(StructuredOutput("grammar", chain)).masks([])


def test_what_one_tenant_compiled_is_compiled_again_for_another(monkeypatch: pytest.MonkeyPatch) -> None:
    made, num_compiled = compiler(), 0
    compile_one = made._matcher

    def counted(output: StructuredOutput) -> Any:
        nonlocal num_compiled
        num_compiled += 1
        return compile_one(output)

    monkeypatch.setattr(made, "_matcher", counted)
    output = StructuredOutput("regex", "ab*")
    for tenant, expected in (("a", 1), ("a", 1), ("b", 2), (None, 3), ("a", 3)):
        made.compile(output, tenant)
        assert num_compiled == expected


BRANCH = {"type": "array", "items": {"$ref": "#"}}


@pytest.mark.parametrize("multiple", [99_991, 999_983, 12_345.5, 0.123456, 1e308 / 3])
def test_a_multiple_that_would_be_counted_up_to_is_refused(multiple: float) -> None:
    schema = {"type": "object", "properties": {"x": {"type": "number", "multipleOf": multiple}}}
    for output in (
        StructuredOutput("json_schema", json.dumps(schema), "guided_thing"),
        StructuredOutput("grammar", f"start: %json {json.dumps(schema)}", "guided_thing"),
    ):
        with pytest.raises(RequestError, match="guided_thing cannot be used: multipleOf"):
            compiler().compile(output)


@pytest.mark.parametrize("lists", [[257], [1500], [200, 200], [10] * 700])
def test_branches_that_would_be_compared_for_long_are_refused(lists: list[int]) -> None:
    schema = {"type": "object", "properties": {str(i): {"anyOf": [BRANCH] * n} for i, n in enumerate(lists)}}
    for output in (
        StructuredOutput("json_schema", json.dumps(schema), "guided_thing"),
        StructuredOutput("grammar", f"start: %json {json.dumps(schema)}", "guided_thing"),
    ):
        with pytest.raises(RequestError, match="too many branches"):
            compiler().compile(output)


# -- masks that are late ---------------------------------------------------------------------------------------------


def many_of(target: Any, count: int, *, k: int) -> tuple[Engine, SamplingParams]:
    """An engine with one request under each of ``count`` grammars, and one, "free", without."""
    engine = make_engine(RandomDrafter(CODEC.vocab_size), target, limit=k, codec=CODEC)
    sampling = SamplingParams(max_tokens=40, temperature=1.0, seed=3, structured_output=OUTPUTS["json_schema"])
    for i in range(count):
        engine.submit(ask(f"{i}", CODEC.encode_prompt(f"def f{i}(a):"), sampling))
    free = replace(sampling, structured_output=None, ignore_eos=True)
    engine.submit(ask("free", (5, 6), free))
    return engine, sampling


def all_of(engine: Engine) -> dict[str, list[int]]:
    return {name: tokens_of(outputs) for name, outputs in finish_all(engine).items()}


@pytest.mark.parametrize("name", ["the bundled one", "Mamba", "Mamba-2", "GPT-J"])
def test_others_go_on_while_a_mask_is_late(target: Any, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """The mask after the first token is held for as long as the other request takes to end.

    Of models that cannot take one token back, the slot is read anew.
    """
    pytest.importorskip("llguidance")
    if name != "the bundled one":
        target = open_target(tiny_model(name, vocab_size=CODEC.vocab_size), num_slots=2)
    expected = all_of(many_of(target, 1, k=0)[0])
    mask, may_go_on, num_held = GrammarState._mask, threading.Event(), 0
    is_held, states = threading.Event(), list[GrammarState]()

    def held(state: GrammarState, trial: Any, tried: Sequence[int]) -> Any:
        nonlocal num_held
        states.append(state)
        if state._token_ids:
            num_held += 1
            is_held.set()
            assert may_go_on.wait(60)
        return mask(state, trial, tried)

    monkeypatch.setattr(GrammarState, "_mask", held)
    engine, _ = many_of(target, 1, k=4)
    said: dict[str, list[int]] = {"0": [], "free": []}
    while len(said["free"]) < 40:
        is_second = bool(said["0"])  # so this step asks for the mask after the first token
        for output in engine.step():
            said[output.request_id] += output.token_ids
        assert engine.check() == [] and (not is_second or is_held.wait(60))
        while not is_held.is_set() and (not states or states[0].is_busy):  # threads of low priority may be late
            time.sleep(0.001)
    assert num_held == 1 and len(said["0"]) < len(expected["0"])
    may_go_on.set()
    for name, more in all_of(engine).items():
        said[name] += more
    assert said == expected


@pytest.mark.parametrize("most_bytes", [1 << 30, 1 << 18, 1])
def test_requests_that_wait_hold_no_compiled_grammar(
    target: Any, monkeypatch: pytest.MonkeyPatch, most_bytes: int
) -> None:
    """What is kept is within the budget, what was put out is compiled again in its turn; none waits for ever."""
    pytest.importorskip("llguidance")
    engine = make_engine("none", target, codec=CODEC)
    assert engine.grammars is not None
    engine.grammars.memory = memory = GrammarMemory(most_bytes)
    compiled: list[str] = []
    compile_one = GrammarCompiler._matcher

    def counted(made: GrammarCompiler, output: StructuredOutput) -> Any:
        compiled.append(output.source)
        return compile_one(made, output)

    monkeypatch.setattr(GrammarCompiler, "_matcher", counted)
    for i in range(40):
        engine.submit(ask(f"{i}", (5, 6), max_tokens=8, structured_output=StructuredOutput("regex", f"a{i}b")))
    assert len(compiled) == 40
    wait_until(lambda: memory.num_bytes <= most_bytes // 2)
    outputs = {name: whole(each).text for name, each in finish_all(engine).items()}
    assert outputs == {f"{i}": f"a{i}b" for i in range(40)}
    assert (len(compiled) > 40) == (most_bytes < 1 << 30)
    wait_until(lambda: memory.num_bytes <= most_bytes // 2)  # a thread may still hold the last state


def test_a_grammar_weighs_what_the_allocator_gave_out_for_it() -> None:
    """Where nothing else allocates: a process of its own."""
    pytest.importorskip("llguidance")
    program = """
import json
from tests.test_grammar import StructuredOutput, compiler
from ssd.text.grammar_memory import allocated_bytes
made, kept = compiler(), []
made._matcher(StructuredOutput("regex", "a"))
for output in (
    StructuredOutput("regex", "(a{900}){1000}"),
    StructuredOutput("regex", "a?" * 2700 + "a" * 2700),
    StructuredOutput("json_schema", '{"type": "integer", "multipleOf": 9973}'),
    StructuredOutput("choice", json.dumps([f"choice {i}" for i in range(2000)])),
):
    before = allocated_bytes()
    kept.append(made._compile(output, None))
    print(json.dumps([allocated_bytes() - before, kept[-1].weight.num_bytes]))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    for line in done.stdout.splitlines():
        grown, weight = json.loads(line)
        assert grown == 0 or 0.5 * grown < weight < 2 * grown + (1 << 20)  # 0: a C library that does not say
