"""What is refused before anything is made of it, and who waits behind whom."""

from __future__ import annotations

import asyncio
import http.client
import json
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pydantic_core
import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.answers.wire import json_text
from server.base.counting import common_tokens, num_values
from server.base.limits import Limits
from server.base.settings import ServerSettings
from server.running.generation_plan import _MAX_LOGPROBS, _bounded, _require_logprobs
from server.running.tokenization import Tokenization, check_token_count
from server.schema.chat import ChatBody
from ssd.config import SamplingParams
from ssd.errors import ContextTooLong, RequestError
from ssd.text.codec import TextCodec
from tests.reference.text import common_subsequence, json_values
from tests.server.client import post, wait_until
from tests.server.failing_engine import FailingEngine, RunningServer, serving
from tests.waiting import PATIENCE_S

COMPLETIONS = "/v1/completions"


# -- counting ----------------------------------------------------------------------------------------------------------

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(alphabet='a",:[{\\é'),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(alphabet='a",:\\'), inner),
)


@given(JSON)
def test_values_are_counted_as_by_the_slow_twin(value: Any) -> None:
    content = json.dumps(value).encode()
    assert num_values(content) == json_values(content)


@given(JSON)
def test_json_is_written_in_pieces_as_at_once(value: Any) -> None:
    assert json_text(value) == pydantic_core.to_json(value)


@given(st.lists(st.integers(0, 2), max_size=300), st.lists(st.integers(0, 2), max_size=100))
def test_common_tokens_of_several_words_equal_the_slow_twin(prediction: list[int], output: list[int]) -> None:
    assert common_tokens(prediction, output) == common_subsequence(prediction, output)


# -- sharing -----------------------------------------------------------------------------------------------------------


class CountingCodec:
    """One token per character; remembers how much it was given."""

    def __init__(self) -> None:
        self.num_characters = 0

    def encode_completion(self, text: str) -> list[int]:
        self.num_characters += len(text)
        return list(range(len(text)))


class CountingLanes:
    """Remembers how long texts were said to be."""

    async def run_on_text(self, num_characters: int, _call: object) -> list[int]:
        self.num_characters = num_characters
        return []


@pytest.mark.parametrize("long", [{"reasoning_content": "x" * 10**6}, {"name": "x" * 10**6}, {"kwargs": "x" * 10**6}])
def test_what_stands_beside_the_content_of_messages_counts_for_how_long_a_text_is(
    long: dict[str, Any], codec: TextCodec
) -> None:
    lanes: Any = CountingLanes()
    engine: Any = SimpleNamespace(codec=codec, max_model_len=8192)
    others = {"chat_template_kwargs": long} if "kwargs" in long else {}
    message = {"role": "assistant", "content": "hm", **({} if others else long)}
    body = ChatBody.parse({"model": "x", "messages": [{"role": "user", "content": "?"}, message], **others})
    asyncio.run(Tokenization(lanes, ServerSettings(model_names=("x",), model="x")).messages(engine, body))
    assert lanes.num_characters > 10**6


@pytest.mark.parametrize("num_choices", [1, 100])
def test_an_answer_with_logprobs_and_no_limit_ends_where_it_holds_the_most(num_choices: int) -> None:
    sampling = SamplingParams(max_tokens=None, logprobs=20)
    bounded = _bounded(sampling, 131_072, 131_000, num_choices)
    assert bounded.max_tokens == _MAX_LOGPROBS // num_choices // 21
    _require_logprobs(bounded, 131_072, 131_000, num_choices)
    assert _bounded(sampling, 131_072, 200, num_choices) is sampling
    given = replace(sampling, max_tokens=131_000)
    with pytest.raises(RequestError, match="lower max_tokens"):
        _require_logprobs(_bounded(given, 131_072, 131_000, num_choices), 131_072, 131_000, num_choices)


def test_a_text_far_too_long_costs_no_more_than_its_beginning() -> None:
    codec: Any = CountingCodec()
    with pytest.raises(ContextTooLong):
        check_token_count(codec, "x" * 10**7, 8192, "prompt")
    assert codec.num_characters <= 4 * 8192
    check_token_count(codec, "x" * 8192, 8192, "prompt")
    assert codec.num_characters <= 4 * 8192


# -- a server ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def server() -> Iterator[RunningServer]:
    limits = Limits(max_body_bytes=200_000, max_body_values=2000, max_body_seconds=1, max_queued_tokens=100)
    with serving(lambda _: FailingEngine(step_s=0.01), limits=limits, api_keys=("secret",)) as running:
        yield running


KEY = {"authorization": "Bearer secret"}


def test_what_says_it_is_too_long_is_refused_unread(server: RunningServer) -> None:
    for length in ("200001", "9" * 19):
        with closing(http.client.HTTPConnection("127.0.0.1", server.port, timeout=PATIENCE_S)) as connection:
            connection.putrequest("POST", COMPLETIONS)
            for name, value in {**KEY, "content-length": length}.items():
                connection.putheader(name, value)
            connection.endheaders()
            response = connection.getresponse()
            assert (response.status, json.load(response)["error"]["code"]) == (413, "body_too_long")


def test_too_many_values_are_refused_before_they_are_made(server: RunningServer) -> None:
    body = b'{"prompt":[' + b"1," * 40_000 + b"1]}"
    answer = post(server.port, COMPLETIONS, body, headers=KEY)
    assert (answer.status, answer.error["code"]) == (413, "body_too_long")
    text = json.dumps({"prompt": "[,{:" * 20_000, "max_tokens": 1}).encode()  # the same in a string is one value
    assert post(server.port, COMPLETIONS, text, headers=KEY).error["code"] == "context_length_exceeded"


def test_tokens_of_all_choices_are_counted_and_given_back(server: RunningServer) -> None:
    body = {"prompt": "x" * 30, "max_tokens": 20}
    assert post(server.port, COMPLETIONS, {**body, "n": 4}, headers=KEY).error["code"] == "queue_full"
    for _ in range(3):
        assert post(server.port, COMPLETIONS, {**body, "n": 3}, headers=KEY).status == 200
    engine = server.engine_thread.engine
    assert isinstance(engine, FailingEngine)
    before = engine.num_cancelled
    with closing(http.client.HTTPConnection("127.0.0.1", server.port)) as connection:
        asked = {**body, "n": 3, "max_tokens": 400, "stream": True}
        connection.request("POST", COMPLETIONS, json.dumps(asked), KEY)
        connection.getresponse().read(10)
        refused = post(server.port, COMPLETIONS, body, headers=KEY)
        assert (refused.status, refused.headers["retry-after"]) == (503, "1")
    wait_until(lambda: post(server.port, COMPLETIONS, body, headers=KEY).status == 200)
    assert engine.num_cancelled == before + 3, "its tokens are free because it ended by itself"
