"""Coupled sampling over HTTP: who asks the same may be told the same, whoever does not want that is not."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import openai
import pytest

from server.command.arguments import parse_arguments
from server.command.noise_secret import NoiseSecret
from server.command.start import open_noise
from tests.redis_server import RedisServer, redis_server
from tests.server.client import ask, bearer, metric, official_client, post, until_ready
from tests.server.conftest import Log
from tests.server.failing_engine import RunningServer
from tests.server.test_cache import SMALL, served
from tests.server.test_process import running

__all__ = ["redis_server"]  # the fixture

QUESTION = [{"role": "user", "content": "Write a Python class that keeps the numbers of a stack."}]
SAMPLED: dict[str, Any] = {"temperature": 0.9, "max_tokens": 24}
PROMPT = "def number_of("


@pytest.fixture(scope="module")
def one_stream(log: Log) -> Iterator[RunningServer]:
    """One stream, and two keys."""
    with served("--coupled-sampling", "1", "--api-key", "alices", "--api-key", "bobs") as running:
        yield running


@pytest.fixture(scope="module")
def four_streams() -> Iterator[RunningServer]:
    with served("--coupled-sampling", "4") as running:
        yield running


def said(client: openai.OpenAI, seed: int | None = None, **extra: Any) -> str:
    messages: Any = QUESTION
    answer = client.chat.completions.create(
        model="test-model", messages=messages, seed=seed or openai.omit, extra_body=extra, **SAMPLED
    )
    return answer.choices[0].message.content or ""


def texts(port: int, **fields: Any) -> list[str]:
    answer = post(port, "/v1/completions", {"prompt": PROMPT, **SAMPLED, **fields})
    assert answer.status == 200, answer.content
    return [choice["text"] for choice in answer.json["choices"]]


# -- one stream --------------------------------------------------------------------------------------------------------


def test_one_stream_says_the_same_to_one_question_and_whoever_declines_draws_alone(one_stream: RunningServer) -> None:
    with official_client(one_stream.port, "alices") as client:
        shared = {said(client) for _ in range(3)} | {said(client, coupled=True)}
        alone = {said(client, coupled=False) for _ in range(3)}
        assert len(shared) == 1 and len(alone) == 3 and not shared & alone
        messages: Any = QUESTION
        stream = client.chat.completions.create(model="test-model", messages=messages, stream=True, **SAMPLED)
        assert {"".join(chunk.choices[0].delta.content or "" for chunk in stream)} == shared


def test_a_seed_goes_before_streams_and_says_what_it_ever_says(one_stream: RunningServer) -> None:
    with official_client(one_stream.port, "alices") as client:
        seeded = {said(client, 7), said(client, 7, coupled=True), said(client, 7, coupled=False)}
        assert len(seeded) == 1 and seeded != {said(client, 8)} and said(client) not in seeded


def test_tenants_and_salts_draw_with_noise_of_their_own(one_stream: RunningServer) -> None:
    with official_client(one_stream.port, "alices") as alice, official_client(one_stream.port, "bobs") as bob:
        found = [said(alice), said(bob), said(alice, cache_salt="a"), said(alice, cache_salt="b")]
        again = [said(alice), said(bob), said(alice, cache_salt="a"), said(alice, cache_salt="b")]
    assert found == again and len(set(found)) == 4


def test_what_was_said_before_a_deletion_is_not_said_after_it(one_stream: RunningServer) -> None:
    with official_client(one_stream.port, "bobs") as bob:
        before = said(bob)
        assert ask(one_stream.port, "DELETE", "/v1/cache", headers=bearer("bobs")).status == 200
        assert said(bob) == said(bob) != before


def test_a_line_and_a_count_tell_who_was_coupled_and_never_with_what(one_stream: RunningServer, log: Log) -> None:
    before = metric(one_stream.port, "ssd:coupled_requests_total")
    for name, fields in (("own-noise", {"coupled": False}), ("seeded", {"seed": 3}), ("shared", {"n": 2})):
        body = {"prompt": PROMPT, "max_tokens": 4, **fields}
        post(one_stream.port, "/v1/completions", body, headers={**bearer("alices"), "x-request-id": name})
    lines = [log.of(name) for name in ("own-noise", "seeded", "shared")]
    assert ["coupled" in line for line in lines] == [False, False, True] and lines[2]["coupled"] is True
    assert not any("noise" in name for line in lines for name in line)
    assert metric(one_stream.port, "ssd:coupled_requests_total") == before + 2


# -- several streams ---------------------------------------------------------------------------------------------------


def test_choices_of_one_prompt_take_different_streams(four_streams: RunningServer) -> None:
    every = texts(four_streams.port, n=4)
    assert len(set(every)) == 4 and sorted(texts(four_streams.port, n=4)) == sorted(every)
    for _ in range(2):
        three = texts(four_streams.port, n=3)
        assert len(set(three)) == 3 and set(three) < set(every)
    assert set(texts(four_streams.port)) < set(every)
    more = texts(four_streams.port, n=6)
    assert len(set(more)) == 6 and set(more) > set(every)


# -- what noise is made of ---------------------------------------------------------------------------------------------


def noise_of(*arguments: str, secret: bytes | None = None) -> NoiseSecret | None:
    return open_noise(parse_arguments(["--coupled-sampling", "1", *arguments], environment={}), secret)


def test_the_root_is_of_what_was_given_else_of_the_seed_else_kept(tmp_path: Path) -> None:
    secret, directory = b"0123456789abcdef", ["--cache-dir", str(tmp_path / "cache")]
    given = [noise_of(*directory, "--seed", "1", secret=secret), noise_of(secret=secret)]
    seeded = [noise_of(*directory, "--seed", "1"), noise_of("--seed", "1")]
    assert not (tmp_path / "cache").exists()
    kept, drawn = [noise_of(*directory), noise_of(*directory)], [noise_of(), noise_of()]
    groups = [[noise for noise in each if noise] for each in (given, seeded, kept, drawn)]
    assert [{noise.source for noise in each} for each in groups] == [{"secret"}, {"seed"}, {"directory"}, {"memory"}]
    roots = [[noise() for noise in each] for each in groups]
    assert [len(set(each)) for each in roots] == [1, 1, 1, 2] and len(set().union(*roots)) == 5
    others = [noise_of("--seed", "2"), noise_of(secret=secret[::-1])]
    assert not {noise() for noise in others if noise} & set().union(*roots)
    assert noise_of("--coupled-sampling", "0", *directory) is None


@pytest.mark.parametrize("secret", [None, b"0123456789abcdef"])
def test_a_replica_without_a_secret_is_told_which_option_it_needs(
    secret: bytes | None, caplog: pytest.LogCaptureFixture
) -> None:
    noise_of("--redis", "redis://127.0.0.1:1/0", secret=secret)
    assert ("the same --secret-file" in caplog.text) == (secret is None)


# -- processes ---------------------------------------------------------------------------------------------------------

PROCESS = (*SMALL, "--cache-tokens", "65536", "--coupled-sampling", "1")


@pytest.mark.slow
def test_replicas_with_one_secret_file_give_one_answer_and_others_are_as_exact(
    tmp_path: Path, redis_server: RedisServer
) -> None:
    files = {name: tmp_path / name for name in ("one", "other")}
    for name, file in files.items():
        file.write_text(f"the secret of fleet {name}")
        file.chmod(0o600)
    common = {name: (*PROCESS, "--secret-file", str(file)) for name, file in files.items()}
    sharing = ("--redis", redis_server.url)
    servers = [(*common["one"], *sharing)] * 2 + [(*common["other"], *sharing), (*common["other"], "--no-speculation")]
    with ExitStack() as stack:
        ports = [stack.enter_context(running(*arguments))[1] for arguments in servers]
        for port in ports:
            until_ready(port)
        for _ in range(2):  # the second time with drafts from the answers of the others
            a, b, other, plain = (texts(port) for port in ports)
            assert a == b != other == plain
        redis_server.kill()
        assert texts(ports[0]) == texts(ports[1]) == a
