"""The speculator for vLLM's V2 runner on hand-made states: against its slow twin, and what it learns."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.child import ROOT
from benchmarks.vllm.client import interpreter
from ssd.bundled import MODEL_PATH
from ssd.errors import ConfigError
from ssd.integrations import vllm_plugin
from ssd.integrations.vllm import SuffixProposer
from ssd.integrations.vllm_core import StopRules, length_before_stop
from ssd.integrations.vllm_hooks import Hook, missing_hooks
from ssd.integrations.vllm_v2 import Speculator
from ssd.text.codec import TextCodec
from tests.reference.speculator import Said, SlowSpeculator
from tests.vllm_runners import VOCAB_SIZE, HandMadeRunner, LateEvent, Scripted, learned_by, scripted, vllm_config

WIDTH, LENGTH, REQUESTS = 4, 96, 6
CPU = torch.device("cpu")


def made(lag: int = 0, adaptive: bool = False, **ssd_settings: Any) -> tuple[HandMadeRunner, Speculator]:
    """A runner and its speculator."""
    runner = HandMadeRunner(max_num_reqs=REQUESTS, max_model_len=LENGTH, width=WIDTH, lag=lag)
    config = vllm_config(
        limit=WIDTH,
        max_num_reqs=REQUESTS,
        max_model_len=LENGTH,
        adaptive=adaptive,
        rebuild_interval_s=3600,
        **ssd_settings,
    )
    runner.speculator = Speculator(config, CPU, runner.states, lambda: LateEvent(runner))
    return runner, runner.speculator


def repetitive(random: np.random.Generator) -> Scripted:
    """Tokens of one of three phrases over and over, some of them changed; now and then an end of text."""
    phrase = np.random.default_rng(int(random.integers(3))).integers(0, 40, 7)
    tokens = np.tile(phrase, 40)
    changed = random.random(len(tokens)) < 0.1
    tokens[changed] = random.integers(0, 40, changed.sum())
    cut = int(random.integers(1, 20))
    return Scripted(tokens[:cut].tolist(), tokens[cut:].tolist(), int(random.integers(1, 60)))


@cache
def bundled_codec() -> TextCodec:
    return TextCodec.load(str(MODEL_PATH))


def client_text(request: Scripted) -> tuple[int, ...]:
    return tuple(request.text[: request.client_length])


@settings(max_examples=8)
@given(st.integers(0, 2**32), st.integers(0, 3), st.data())
def test_drafts_and_chances_are_those_of_the_twin(seed: int, lag: int, data: st.DataObject) -> None:
    random = np.random.default_rng(seed)
    runner, fast = made(lag, adaptive=True)
    core = fast._core
    assert core is not None
    slow = SlowSpeculator(
        width=WIDTH, max_length=LENGTH, vocab_size=VOCAB_SIZE, ends=sorted(core.end_of_text_ids), lag=lag
    )
    stays: dict[str, str] = {}  # the twin's name of a stay in the slots
    away: dict[str, Scripted] = {}
    for number in range(data.draw(st.integers(5, 30), label="steps")):
        over = [name for name, r in runner.requests.items() if len(r.said) >= r.max_tokens and random.random() < 0.7]
        over += [name for name, r in runner.requests.items() if len(r.text) > LENGTH - 8 and name not in over]
        if over:
            runner.end(over)
            for name in over:
                slow.end(stays.pop(name))
        if runner.requests and random.random() < 0.15:
            name = str(random.choice(list(runner.requests)))
            away[name] = runner.preempt(name)
        room = REQUESTS - len(runner.requests)
        coming = {name: away.pop(name) for name in list(away)[:room] if random.random() < 0.5}
        while len(runner.requests) + len(coming) < REQUESTS and random.random() < 0.4:
            coming[f"{number}-{len(coming)}"] = repetitive(random)
        if coming:
            runner.begin(coming)
            for name, request in coming.items():
                if name in stays:
                    slow.end(stays[name])
                stays[name] = f"{name} {number}"
                slow.begin(stays[name], request.text, len(request.prompt))
        names = [name for name in random.permutation(sorted(runner.requests)).tolist() if random.random() < 0.9]
        if not names:
            continue
        waiting = {name for name in names if random.random() < 0.2}
        before = {name: len(runner.requests[name].said) for name in names}
        width = int(random.choice([0, 2, WIDTH, WIDTH, WIDTH]))
        got = runner.step(names, waiting, width)
        said = [Said(stays[name], runner.requests[name].said[before[name] :]) for name in names]
        texts = {stays[name]: runner.requests[name].text for name in names}
        # What ended and had not arrived is learned within the step, before it drafts: look again.
        snapshot = core.cache.snapshot()
        want = slow.step(said, [bool(new) for _, new in said], texts, snapshot, width)
        chances = fast.draft_token_confidence_probs[: len(names)]
        for row, (draft, estimates) in enumerate(want):
            last = int(runner.last_sampled[runner.requests[names[row]].slot, 0])
            assert got[row].tolist() == draft + [last] * (width - len(draft)) + [-1] * (WIDTH - width)
            padded = np.array(estimates + [0.0] * (width - len(draft)))
            np.testing.assert_allclose(chances[row, :width].numpy(), padded, rtol=1e-6)
    fast.close()
    assert fast.stats().num_failures == 0


# What is learned


@pytest.mark.parametrize("lag", [0, 1, 2])
def test_each_request_is_learned_once_as_its_client_got_it(lag: int) -> None:
    """Limits cut what ran on, one is aborted early, one is preempted and comes back."""
    runner, speculator = made(lag)
    learned, truth = learned_by(speculator), []
    requests = {str(number): scripted(number, max_tokens=5 + 4 * number) for number in range(5)}
    requests["aborted"] = requests.pop("4")
    runner.begin(requests)
    preempted = None
    for number in range(30):
        names = [name for name in runner.requests if name != "aborted" or number < 6]
        over = [n for n in names if len(runner.requests[n].said) >= runner.requests[n].max_tokens + 2]
        over += ["aborted"] if number == 6 else []
        if over:
            truth += [client_text(request) for request in runner.end(over)]
        if number == 4:
            preempted = runner.preempt("3")
        if number == 8 and preempted is not None:
            runner.begin({"3": preempted})
        names = [name for name in names if name in runner.requests]
        if names:
            runner.step(names)
    assert not runner.requests
    assert len(learned) >= len(truth) - (lag > 0), "what has arrived is learned"
    speculator.close()
    assert Counter(learned) == Counter(truth)
    assert speculator.stats().num_stored == 5
    assert speculator.stats().num_failures == 0


def test_a_preempted_request_that_is_aborted_is_learned() -> None:
    runner, speculator = made(1)
    learned = learned_by(speculator)
    runner.begin({"a": scripted(1, max_tokens=50), "b": scripted(2)})
    for _ in range(4):
        runner.step(["a", "b"])
    away = runner.preempt("a")
    runner.step(["b"])
    runner.requests["a"] = away  # the scheduler has it
    runner.end(["a"])
    assert learned == [client_text(away)]
    speculator.close()


def test_a_request_that_was_told_nothing_teaches_nothing() -> None:
    runner, speculator = made()
    learned = learned_by(speculator)
    runner.begin({"a": scripted(1), "b": scripted(2), "c": scripted(3)})
    runner.step(["a", "b"], waiting=["b"])
    runner.end(["b"])
    text = client_text(runner.requests["a"])
    speculator.close()
    assert learned == [text]
    assert speculator.stats().num_stored == 1


def test_a_stop_string_ends_what_is_learned() -> None:
    codec = bundled_codec()
    prompt, output = codec.encode_prompt("x = "), codec.encode_completion("first(1)\nsecond(2)\nthird(3)\n")
    runner, speculator = made()
    learned = learned_by(speculator)
    runner.begin({"a": Scripted(prompt, output, 100)}, stop=["second", "never"])
    while len(runner.requests["a"].said) < len(output) - 1:
        runner.step(["a"])
    runner.end(["a"])
    (text,) = learned
    assert codec.decode(list(text)[len(prompt) :]).endswith("second")
    speculator.close()


@settings(max_examples=40)
@given(st.text("abc ", max_size=30), st.lists(st.text("abc ", min_size=1, max_size=3), max_size=3), st.integers(0, 9))
def test_outputs_end_at_the_first_stop_string(said: str, strings: list[str], min_tokens: int) -> None:
    """Against trying every length."""
    codec = bundled_codec()
    tokens = codec.encode_completion(said)
    before = codec.decode(tokens[:min_tokens], skip_special_tokens=True)
    texts = [codec.decode(tokens[:count], skip_special_tokens=True) for count in range(len(tokens) + 1)]
    want = next(
        (n for n, text in enumerate(texts) if n >= min_tokens and any(s in text[len(before) :] for s in strings)),
        len(tokens),
    )
    assert length_before_stop(codec, tokens, StopRules(tuple(strings), min_tokens, True)) == want


def test_a_restart_is_warm(tmp_path: Path) -> None:
    steps = []
    for _ in range(2):
        runner, speculator = made(cache_dir=str(tmp_path))
        runner.begin({"a": scripted(7, max_tokens=40)})
        while len(runner.requests["a"].said) < 40:
            runner.step(["a"])
        runner.end(["a"])
        speculator.close()
        steps.append(runner.num_steps)
    assert steps[0] == 40 and steps[1] < 15


# A device that is late, and what goes wrong


def test_failures_cost_drafts_and_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    runner, speculator = made()
    runner.begin({"a": scripted(1)})
    core = speculator._core
    assert core is not None
    with monkeypatch.context() as patched:
        patched.setattr(core.drafter, "draft", None)
        drafts = runner.step(["a"])
    assert drafts.tolist() == [[int(runner.last_sampled[runner.requests["a"].slot, 0])] * WIDTH]
    runner.speculator.on_add(SimpleNamespace(scheduled_new_reqs=[None]))
    runner.speculator.on_finished(runner, SimpleNamespace(finished_req_ids=[None]))
    assert speculator.stats().num_failures >= 2
    speculator.close()
    speculator.close()
    assert runner.step(["a"]).tolist() == [[int(runner.last_sampled[runner.requests["a"].slot, 0])] * WIDTH], "closed"


@pytest.mark.parametrize(
    ("names", "more"),
    [
        (["_warmup_0_", "_v2_mixed_warmup_1_", "_sparse_mla_v2_warmup_0_"], {}),
        (["a"], {"prompt_embeds": torch.zeros(20, 8)}),
    ],
    ids=["what vLLM warms up with", "a prompt that is no text"],
)
def test_what_is_no_clients_text_is_not_learned(names: list[str], more: dict[str, Any]) -> None:
    runner, speculator = made()
    learned = learned_by(speculator)
    runner.begin({name: scripted(number) for number, name in enumerate(names)}, **more)
    for _ in range(3):
        runner.step(names)
    runner.end(names)
    speculator.close()
    assert learned == [] and speculator.stats().num_failures == 0


def test_a_request_whose_tokens_are_missing_is_let_go() -> None:
    runner, speculator = made()
    learned = learned_by(speculator)
    runner.begin({"a": scripted(1), "b": scripted(2)})
    runner.step(["a", "b"])
    runner.states.total_len.gpu[runner.requests["a"].slot] += 3
    runner.requests["a"].said += [1, 2, 3]
    for _ in range(3):
        runner.step(["a", "b"])
    truth = [client_text(request) for request in runner.end(["a", "b"])]
    assert learned == truth[1:]
    speculator.close()
    assert speculator.stats().num_failures == 0


def test_steps_that_are_none_and_requests_that_were_never_seen_are_taken() -> None:
    runner, speculator = made()
    nothing = SimpleNamespace(num_reqs=2, req_ids=["x", "y"])
    dummy = speculator.propose(
        input_batch=nothing,
        attn_metadata=None,
        slot_mappings=None,
        last_hidden_states=None,
        aux_hidden_states=None,
        num_sampled=torch.ones(2),
        num_rejected=None,
        last_sampled=runner.last_sampled,
        next_prefill_tokens=None,
        temperature=None,
        seeds=None,
        dummy_run=True,
        skip_attn_for_dummy_run=True,
        is_profile=True,
    )
    assert dummy.shape == (2, WIDTH)
    runner.begin({"a": scripted(1)})
    assert speculator._core is not None
    speculator._core.pop("a")
    runner.step(["a"])
    assert speculator.stats().num_failures == 0
    speculator.close()


# What is asked of vLLM


def test_models_with_a_running_state_are_refused_on_both_runners() -> None:
    for make in (lambda c: SuffixProposer(c), lambda c: Speculator(c, CPU, None)):
        config = vllm_config()
        config.model_config.is_hybrid = True
        with pytest.raises(ConfigError, match=r"running state .* issue 39273"):
            make(config)


def test_a_hook_that_looks_otherwise_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "engine_of_another.py").write_text(
        "class Runner:\n    kind: int\n    def __init__(self):\n        self.states = 1\n"
        "    @property\n    def size(self): ...\n    def step(self, output, extra=None): ...\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    module = "engine_of_another"
    assert (
        missing_hooks(
            [Hook(module, "Runner", ("kind", "states", "size")), Hook(module, "Runner.step", ("self", "output"))]
        )
        == []
    )
    lacks = missing_hooks(
        [
            Hook(module, "Runner.step", ("self", "scheduler_output")),
            Hook(module, "Runner", ("other",)),
            Hook(module, "make", ()),
            Hook("engine_of_nobody", "make", ()),
        ]
    )
    assert lacks == [
        "engine_of_another:Runner.step has the parameters self, output, extra, not self, scheduler_output",
        "engine_of_another:Runner has no other",
        "there is no engine_of_another:make",
        "there is no engine_of_nobody:make",
    ]


def test_without_its_hooks_nothing_is_registered(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(vllm_plugin, "_is_registered", False)
    monkeypatch.setattr(vllm_plugin, "V2_HOOKS", (Hook("engine_of_nobody", "make", ()),) * 2)
    vllm_plugin.register()
    vllm_plugin.register()
    assert [record.message for record in caplog.records] == [
        "SSD does not support the V2 model runner of the installed vLLM: there is no "
        "engine_of_nobody:make, and 1 more. vLLM's own n-gram method drafts instead"
    ]


def test_the_entry_point_imports_nothing_heavy() -> None:
    code = "import sys, ssd.integrations.vllm_plugin; print(sorted({'numba', 'torch'} & set(sys.modules)))"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert loaded.stdout.strip() == "[]"


# vLLM itself

needs_vllm = pytest.mark.skipif(
    not (Path(__file__).parent.parent / ".venv-vllm" / ".ready").exists(),
    reason="vLLM is not installed: run `make bench-vllm`",
)


@needs_vllm
def test_the_installed_vllm_has_every_hook() -> None:
    code = "from ssd.integrations import vllm_hooks as p; "
    code += "print(p.missing_hooks(p.V2_HOOKS + p.V1_HOOKS))"
    looked = subprocess.run([interpreter(), "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert looked.stdout.strip() == "[]", looked.stderr[-2000:]


@needs_vllm
def test_the_arguments_that_trainers_pass_on_select_ssd() -> None:
    """Those of docs/guides/rollouts.md: verl, SkyRL and NeMo-RL pass a dict to vLLM's engine arguments."""
    code = f"""
from vllm.engine.arg_utils import EngineArgs
from ssd.integrations.vllm_hooks import selects_ssd
arguments = EngineArgs(model={str(MODEL_PATH)!r}, enforce_eager=True, max_model_len=256, speculative_config={{
    "method": "ngram_gpu", "model": "ssd", "num_speculative_tokens": 5}})
config = arguments.create_engine_config()
print("selected", selects_ssd(config), config.speculative_config.num_speculative_tokens)
"""
    environment = os.environ | {"VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
    done = subprocess.run([interpreter(), "-c", code], capture_output=True, text=True, cwd=ROOT, env=environment)
    assert "selected True 5" in done.stdout, done.stderr[-2000:]
