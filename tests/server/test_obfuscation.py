"""An obfuscated stream looks the same on the wire, whatever was drafted and accepted."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.answers.obfuscation import EqualChunks, TickClock
from server.answers.wire import PADDED_BYTES
from server.base.settings import ObfuscationOptions
from ssd.bundled import MODEL_PATH
from ssd.engine import FinishReason, RequestOutput, RequestStats
from ssd.text.codec import TextCodec
from ssd.text.detokenizer import TextStream
from tests.server.apis import CHAT, COMPLETIONS, INPUT, RESPONSES, Api
from tests.server.bundled_engine import load_bundled
from tests.server.client import metric, post
from tests.server.eavesdropper import RECORD_BYTES, watch
from tests.server.failing_engine import FailingEngine, RunningServer, serving

PIECE_TOKENS = ObfuscationOptions().obfuscation_tokens
INTERVAL_S = 0.02
PROMPT = "def add(a, b):\n    return"


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with serving(load_bundled, obfuscation_interval_s=INTERVAL_S) as running:
        yield running


ACCEPTED = "vllm:spec_decode_num_accepted_tokens_total"
USAGE = {"include_usage": True, "continuous_usage_stats": True}


@pytest.mark.parametrize(
    ("api", "fields", "options"),
    [
        (COMPLETIONS, {"prompt": PROMPT}, {}),
        (COMPLETIONS, {"prompt": PROMPT, "temperature": 1.0, "seed": 5}, {"include_usage": True}),
        (COMPLETIONS, {"prompt": PROMPT, "logprobs": 2, "echo": True, "return_token_ids": True}, USAGE),
        (COMPLETIONS, {"prompt": [PROMPT, "import os\n"], "n": 2, "seed": 1, "temperature": 0.8}, USAGE),
        (COMPLETIONS, {"prompt": PROMPT, "stop": ["zzz", "\n\n\n\n\n"], "prediction": PROMPT * 4}, USAGE),
        (CHAT, {}, {}),
        (CHAT, {"logprobs": True, "n": 3, "temperature": 1.0, "seed": 2}, USAGE),
        (RESPONSES, {}, {}),
    ],
)
def test_number_and_sizes_of_writes_do_not_tell_what_was_accepted(
    server: RunningServer, api: Api, fields: dict[str, Any], options: dict[str, Any]
) -> None:
    if "prediction" in fields:
        fields = {**fields, "prediction": {"type": "content", "content": fields["prediction"]}}
    asked = {**api.asking(INPUT), "temperature": 0, api.limit: 100, "ignore_eos": True, **fields}
    whole = post(server.port, api.path, asked).json  # and the cache has learned it
    obfuscated = {**asked, "stream_options": {"include_obfuscation": True, **options}}
    before = metric(server.port, ACCEPTED)
    plain = watch(server.port, {**obfuscated, "num_speculative_tokens": 0}, api.path)
    assert metric(server.port, ACCEPTED) == before
    drafted = watch(server.port, obfuscated, api.path)
    assert metric(server.port, ACCEPTED) > before + 40
    assert drafted.sizes == plain.sizes and are_even(plain.sizes)
    if api is RESPONSES:
        texts = {0: api.said(whole)}
    else:
        assert len(plain.sizes) == -(-100 // PIECE_TOKENS)
        texts = {choice["index"]: api.said({"choices": [choice]}) for choice in whole["choices"]}
    assert said(api, plain.content) == said(api, drafted.content) == texts


def are_even(sizes: Sequence[int]) -> bool:
    """Whether all writes but the last are padded."""
    return all((size - RECORD_BYTES) % PADDED_BYTES == 0 for size in sizes[:-1])


def said(api: Api, stream: bytes) -> dict[int, str]:
    """The text of every choice."""
    texts: dict[int, str] = {}
    for event in api.events_in(stream):
        for choice in event.get("choices", [{}]):
            index = choice.get("index", 0)
            piece = api.piece({"choices": [choice]} if choice else event)
            texts[index] = texts.get(index, "") + (piece or "")
    return texts


@pytest.mark.parametrize("obfuscation", ["default", "always"])
def test_the_operator_obfuscates_streams_that_do_not_ask(obfuscation: str) -> None:
    asked = {"prompt": "ab" * 30, "max_tokens": 60}
    declined = {"include_obfuscation": False}
    settings: dict[str, Any] = {"obfuscation": obfuscation, "obfuscation_interval_s": 0.1, "obfuscation_tokens": 20}
    with serving(lambda _: FailingEngine(), **settings) as server:
        trace = watch(server.port, asked)
        assert len(trace.sizes) == 3 and are_even(trace.sizes)
        assert said(COMPLETIONS, trace.content) == {0: "ba" * 30}
        trace = watch(server.port, {**asked, "stream_options": declined})
        assert (len(trace.sizes) == 3) == (obfuscation == "always")
        started = time.monotonic()
        whole = post(server.port, COMPLETIONS.path, asked)
        is_paced = time.monotonic() - started >= 0.29  # three pieces
        assert whole.json["choices"][0]["text"] == "ba" * 30
        assert (is_paced and len(whole.content) % PADDED_BYTES == 0) == (obfuscation == "always")


def test_a_stream_that_fails_says_so() -> None:
    asked = {"prompt": "ab" * 30, "max_tokens": 60, "stream": True, "stream_options": {"include_obfuscation": True}}
    with serving(lambda _: FailingEngine(fail_at_step=40), obfuscation_interval_s=0.0) as server:
        *events, failed = post(server.port, COMPLETIONS.path, asked).events
    assert "".join(event["choices"][0]["text"] for event in events) == "ba" * 16  # two whole pieces of 40 tokens
    assert failed["error"]["code"] is not None


# -- cutting -----------------------------------------------------------------------------------------------------------


def outputs(codec: TextCodec, token_ids: list[int], cuts: list[int]) -> list[RequestOutput]:
    """An output of ``token_ids`` whose steps end at ``cuts``."""
    stream = TextStream(codec)
    bounds = sorted({*(cut for cut in cuts if cut < len(token_ids)), len(token_ids)} - {0})
    made = []
    for start, stop in zip([0, *bounds], bounds, strict=False):
        text, ended = stream.push(token_ids[start:stop]), stop == len(token_ids)
        text += stream.finish() if ended else ""
        made.append(
            RequestOutput(
                request_id="a",
                token_ids=tuple(token_ids[start:stop]),
                text=text,
                finish_reason=FinishReason.LENGTH if ended else None,
                stats=RequestStats(),
            )
        )
    return made


@pytest.fixture(scope="module")
def codec() -> TextCodec:
    return TextCodec.load(str(MODEL_PATH))


@given(
    st.lists(st.lists(st.integers(4, 300), min_size=1, max_size=70), min_size=1, max_size=3),
    st.lists(st.integers(1, 70), max_size=40),
    st.randoms(use_true_random=False),
)
def test_pieces_do_not_depend_on_how_tokens_came(
    codec: TextCodec, choices: list[list[int]], cuts: list[int], random: Any
) -> None:
    """Tokens of 4..300 are mostly single bytes: many characters are spelled by several."""
    found = []
    for cut_at in (cuts, range(71), []):
        pieces = EqualChunks([TextStream(codec) for _ in choices], PIECE_TOKENS)
        steps = [[(i, output) for output in outputs(codec, ids, [*cut_at])] for i, ids in enumerate(choices)]
        rounds = []
        while any(steps):
            index, output = random.choice([queue for queue in steps if queue]).pop(0)
            pieces.add(index, output)
            while pairs := pieces.next_round():
                rounds.append([(i, piece.token_ids, piece.text, piece.finish_reason) for i, piece in pairs])
        assert pieces.ended
        found.append(rounds)
    assert found[0] == found[1] == found[2]
    for index, token_ids in enumerate(choices):
        mine = [piece for pairs in found[0] for piece in pairs if piece[0] == index]
        assert [len(piece[1]) for piece in mine[:-1]] == [PIECE_TOKENS] * (len(mine) - 1)
        assert [token for piece in mine for token in piece[1]] == token_ids
        assert "".join(piece[2] for piece in mine) == "".join(o.text for o in outputs(codec, token_ids, []))


# -- the pace ----------------------------------------------------------------------------------------------------------


def test_a_clock_ticks_evenly_and_waits_for_nobody_who_is_late() -> None:
    async def ticks() -> list[float]:
        pace, started, found = TickClock(0.05, lambda: False), time.monotonic(), []
        for work_s in (0.0, 0.0, 0.12, 0.0):
            await asyncio.sleep(work_s)
            await pace.wait_until()
            found.append(time.monotonic() - started)
        return found

    found = asyncio.run(ticks())
    assert all(at >= earliest - 0.01 for at, earliest in zip(found, (0.05, 0.10, 0.25, 0.30), strict=True))
    assert found[-1] < 2
