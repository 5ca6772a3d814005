"""The class that a first program uses."""

from __future__ import annotations

import io
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ssd import LLM, EngineConfig, Request, SamplingParams
from ssd.errors import ConfigError, ContextTooLong, RequestError

GREEDY = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)
PROMPT = "def read_lines(path):\n"


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(config=EngineConfig(max_num_seqs=4, max_waiting=4)) as opened:
        yield opened


def test_what_comes_again_takes_fewer_passes_and_says_the_same() -> None:
    with LLM() as opened:
        (first,), (again,) = opened.generate(PROMPT, GREEDY), opened.generate(PROMPT, GREEDY)
        assert first.text == again.text and first.token_ids == again.token_ids
        assert again.stats.num_verify_steps < first.stats.num_verify_steps / 3
        assert again.outputs[0].finish_reason == "length"


def test_prompts_are_texts_or_ids_one_or_many_each_with_settings_of_its_own(llm: LLM) -> None:
    ids = llm.codec.encode_prompt(PROMPT)
    both: list[str | list[int]] = [PROMPT, ids]
    expected = llm.generate(PROMPT, GREEDY)[0]
    for prompts in (ids, tuple(ids), np.array(ids), [PROMPT], [ids]):
        (found,) = llm.generate(prompts, GREEDY)  # type: ignore[arg-type]
        assert (found.text, found.prompt_token_ids) == (expected.text, tuple(ids))
    many = llm.generate(both * 6, GREEDY)  # more than there are slots and places in the queue
    assert [each.text for each in many] == [expected.text] * 12
    short = SamplingParams(max_tokens=3, temperature=0.0)
    assert [len(each.token_ids) for each in llm.generate(both, [GREEDY, short])] == [40, 3]
    assert llm.generate([]) == []


def test_several_outputs_of_a_prompt_differ_and_come_again_with_the_seed(llm: LLM) -> None:
    sampling = SamplingParams(max_tokens=12, temperature=1.0, seed=5)
    (found,), (again,) = llm.generate(PROMPT, sampling, n=3), llm.generate(PROMPT, sampling, n=3)
    texts = [each.text for each in found.outputs]
    assert len(set(texts)) == 3 and texts == [each.text for each in again.outputs] and found.text == texts[0]


def test_the_number_of_outputs_may_be_that_of_the_sampling_parameters(llm: LLM) -> None:
    one, two = (SamplingParams(n=n, max_tokens=4, temperature=1.0, seed=5) for n in (1, 2))
    first, second, third = llm.generate([PROMPT] * 3, sampling_params=[two, one, two])
    assert [len(each.outputs) for each in (first, second, third)] == [2, 1, 2]
    assert first.outputs[1].text == third.outputs[1].text and second.text == first.text
    assert [each.index for each in first.outputs] == [0, 1]
    with pytest.raises(RequestError, match="submit a request for each output"):
        llm.engine.submit(Request(request_id="two", prompt_token_ids=(1, 2), sampling=two))


def test_statistics_can_be_printed(llm: LLM) -> None:
    (found,) = llm.generate(PROMPT, GREEDY)
    shown = repr(found.stats)
    assert shown.startswith("RequestStats(num_prompt_tokens=") and "num_output_tokens=40" in shown


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (
            {"tensor_parallel_size": 2},
            "tensor_parallel_size=2 is not supported: this library runs a model on one device",
        ),
        ({"max_model_length": 9}, "LLM has no argument max_model_length: did you mean max_model_len?"),
        ({"frobnicate": 1}, "LLM has no argument frobnicate"),
        ({"gpu_memory_utilization": 7.0}, "gpu_memory_utilization must be above 0"),
        ({"quantization": "awq"}, "a quantised checkpoint declares its own quantisation"),
    ],
)
def test_arguments_of_vllm_are_refused_in_a_sentence(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(says)):
        LLM(**options)


def test_arguments_of_vllm_work() -> None:
    with LLM(max_model_len=64, max_num_seqs=2, gpu_memory_utilization=0.9, tensor_parallel_size=1) as opened:
        assert (opened.engine.max_model_len, opened.engine.config.max_num_seqs) == (64, 2)


def test_outputs_of_a_prompt_that_share_noise_have_different_streams() -> None:
    sampling = SamplingParams(max_tokens=12, temperature=1.0)
    with LLM(config=EngineConfig(coupled_streams=4)) as opened:
        for _ in range(3):
            (found,) = opened.generate(PROMPT, sampling, n=4)
            assert len({each.text for each in found.outputs}) == 4


def test_a_conversation_is_what_its_template_writes(llm: LLM) -> None:
    messages = [{"role": "user", "content": "What is a list?"}]
    if not llm.codec.has_chat_template:
        with pytest.raises(RequestError, match="chat template"):
            llm.chat(messages, GREEDY)
        return
    (found,), both = llm.chat(messages, GREEDY), llm.chat([messages, messages], GREEDY)
    assert found.prompt_token_ids == tuple(llm.codec.encode_chat(messages))
    assert [each.text for each in both] == [found.text] * 2


def test_streams_are_read_by_turns_and_one_that_is_left_is_cancelled(llm: LLM) -> None:
    expected = llm.generate(PROMPT, GREEDY)[0].text
    one, other, left = (llm.stream(PROMPT, GREEDY) for _ in range(3))
    next(left)
    left.close()  # type: ignore[attr-defined]
    llm.stream(PROMPT, GREEDY)  # one that nobody reads
    pieces: list[list[str]] = [[], []]
    for outputs in zip_longest(one, other):  # how many depends on what was learned when
        for said, output in zip(pieces, outputs, strict=True):
            said.append(output.text if output else "")
    assert ["".join(each) for each in pieces] == [expected] * 2
    llm.generate(PROMPT, GREEDY)
    assert not llm.engine.has_work()


@pytest.mark.parametrize(
    ("prompts", "sampling", "more", "param"),
    [
        (3, GREEDY, {}, "prompts"),
        (None, GREEDY, {}, "prompts"),
        ([3.5], GREEDY, {}, "prompts"),
        ([["a"]], GREEDY, {}, "prompts"),
        ({"prompt": "a"}, GREEDY, {}, "prompts"),
        ([{"prompt": "a"}], GREEDY, {}, "prompts"),
        (b"a", GREEDY, {}, "prompts"),
        ([b"a"], GREEDY, {}, "prompts"),
        ("", {"max_tokens": 3}, {}, "sampling_params"),
        (["a", "b"], [GREEDY], {}, "sampling_params"),
        ("a", GREEDY, {"n": 0}, "n"),
        ([[]], GREEDY, {}, "prompt"),
    ],
)
def test_what_cannot_be_used_is_named(llm: LLM, prompts: Any, sampling: Any, more: Any, param: str) -> None:
    with pytest.raises(RequestError) as raised:
        llm.generate(prompts, sampling, **more)
    assert raised.value.param == param


def test_one_prompt_that_is_too_long_ends_the_call_and_nothing_else(llm: LLM) -> None:
    with pytest.raises(ContextTooLong):
        llm.generate([[1], [1] * (llm.engine.max_model_len + 1)], GREEDY)
    assert llm.generate(PROMPT, GREEDY)[0].text
    assert not llm.engine.has_work()


class Terminal(io.StringIO):
    """Text that is written to what says that it is a terminal."""

    def isatty(self) -> bool:
        return True


def test_a_terminal_shows_the_stages_of_a_load_and_the_progress_of_many_outputs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    messages = [{"role": "user", "content": "What is a list?"}]

    def shown(*calls: Callable[[], object]) -> str:
        terminal.truncate(terminal.seek(0))
        for call in calls:
            call()
        return terminal.getvalue()

    def load() -> LLM:
        return LLM(config=EngineConfig(max_num_seqs=2, max_waiting=1))

    loaded = list[LLM]()
    assert "reading the weights of" in shown(lambda: loaded.append(load()))
    with loaded[0] as llm:
        found = shown(lambda: llm.generate([PROMPT] * 5, GREEDY))  # more than there are slots and places in the queue
        last = found.rstrip().rpartition("\r")[2]
        assert last.startswith("Processed prompts: 100%") and " 5/5 " in last, last
        assert re.search(r"est. speed input: [\d.]+ toks/s, output: [1-9][\d.]+ toks/s", last), last
        assert " 3/3 " in shown(lambda: llm.generate(PROMPT, GREEDY, n=3))
        if llm.codec.has_chat_template:
            assert " 2/2 " in shown(lambda: llm.chat([messages] * 2, GREEDY))
            assert not shown(lambda: llm.chat([messages] * 2, GREEDY, use_tqdm=False))
        assert not shown(
            lambda: llm.generate(PROMPT, GREEDY),
            lambda: llm.generate([PROMPT], GREEDY),
            lambda: llm.generate([PROMPT] * 2, GREEDY, use_tqdm=False),
            lambda: list(llm.stream(PROMPT, GREEDY)),
            lambda: llm.generate([]),
        )
        other = llm.stream(PROMPT, GREEDY)
        next(other)
        assert " 2/2 " in shown(lambda: llm.generate([PROMPT] * 2, GREEDY), other.close)  # type: ignore[attr-defined]
        monkeypatch.setattr(sys, "stderr", log := io.StringIO())
        llm.generate([PROMPT] * 2, GREEDY)
        assert log.getvalue() == ""
    assert capsys.readouterr().out == ""


OTHER = """
import sys
import pytest
from ssd import LLM, SamplingParams
from tests.fixed_times import fix_times
fix_times(pytest.MonkeyPatch())
with LLM(cache_dir=sys.argv[1]) as llm:
    (found,) = llm.generate(sys.argv[2], SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True))
    print(found.stats.num_verify_steps)
    print("kept", flush=True)
    sys.stdin.readline()
"""


def test_a_directory_is_kept_and_read_by_a_second_process(tmp_path: Path) -> None:
    with LLM(cache_dir=tmp_path) as opened:
        alone = opened.generate(PROMPT, GREEDY)[0].stats.num_verify_steps
    command = [sys.executable, "-c", OTHER, str(tmp_path), PROMPT]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdin is not None and writer.stdout is not None
        lines = [writer.stdout.readline(), writer.stdout.readline()]
        assert int(lines[0]) < alone / 2 and lines[1] == "kept\n"
        with LLM(cache_dir=tmp_path) as reader:  # the other one writes
            assert reader.generate(PROMPT, GREEDY)[0].stats.num_verify_steps < alone / 2
        writer.stdin.close()
        assert writer.wait() == 0
