"""The examples, and the README's, run as they stand and show what they say."""

from __future__ import annotations

import re
from contextlib import ExitStack
from pathlib import Path

import pytest

from examples import engine, openai_client, own_engine, shared_cache, steps, transformers_generate, warm_start
from ssd.bundled import MODEL_PATH
from ssd.engine import Engine
from tests.redis_server import RedisServer, redis_server
from tests.server.failing_engine import serving

__all__ = ["redis_server"]  # a fixture

pytestmark = pytest.mark.slow


def numbers(text: str, pattern: str) -> list[float]:
    return [float(found) for found in re.findall(pattern, text)]


def test_readme_runs(capsys: pytest.CaptureFixture[str]) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", (Path(__file__).parent.parent / "README.md").read_text(), re.DOTALL)
    exec(compile(code, "README.md", "exec"), {})
    first, again = numbers(capsys.readouterr().out, r"(?:first|again) (\d+) passes")
    assert again < first / 2


def test_engine_needs_fewer_passes_the_second_time(capsys: pytest.CaptureFixture[str]) -> None:
    engine.main()
    first, second = numbers(capsys.readouterr().out, r"in (\d+) passes")
    assert second < first / 2


def test_an_engine_that_verifies_drafts_itself(capsys: pytest.CaptureFixture[str]) -> None:
    own_engine.main()
    shown = capsys.readouterr().out
    first, second = numbers(shown, r"(\d+) passes")
    assert second < first / 2 and "equal outputs: True" in shown


def test_every_pass_yields_its_accepted_tokens_and_one_more(capsys: pytest.CaptureFixture[str]) -> None:
    steps.main()
    runs = [run.splitlines() for run in capsys.readouterr().out.strip().split("\n\n")]
    for run in runs:
        passes = [line.split()[:4] for line in run[2:-1]]
        assert [number for number, *_ in passes] == [str(number) for number in range(1, len(passes) + 1)]
        assert all(int(accepted) <= int(drafted) for *_, drafted, accepted in passes)
        num_tokens = sum(int(accepted) + 1 for *_, accepted in passes)
        assert run[-1] == f"{len(passes)} passes for {num_tokens} tokens" and num_tokens == 40
    first, second = map(len, runs)
    assert second < first / 2


def test_warm_start_gives_more_tokens_per_step(capsys: pytest.CaptureFixture[str]) -> None:
    warm_start.main()
    cold, warm = numbers(capsys.readouterr().out, r"([\d.]+) tokens per step")
    assert warm > 2 * cold


def test_second_replica_profits_from_the_first(redis_server: RedisServer, capsys: pytest.CaptureFixture[str]) -> None:
    shared_cache.main(redis_server.url)
    first, second = numbers(capsys.readouterr().out, r"in (\d+) passes")
    assert second < first / 2


def test_transformers_gives_the_same_in_fewer_passes(capsys: pytest.CaptureFixture[str]) -> None:
    transformers_generate.main()
    text = capsys.readouterr().out
    alone, first, second = numbers(text, r"(\d+) passes")
    assert second < first <= alone
    assert text.count("the same output: True") == 2


def test_client_gets_the_same_text_whole_and_streamed(capsys: pytest.CaptureFixture[str]) -> None:
    def load(resources: ExitStack) -> Engine:
        loaded = Engine.from_pretrained(MODEL_PATH)
        resources.callback(loaded.close)
        return loaded

    with serving(load, model=str(MODEL_PATH)) as running:
        openai_client.main(f"{running.url}/v1")
    whole, streamed = re.findall(r"^\w+: +('.*?'|\".*?\")(?: in \d+ events)?$", capsys.readouterr().out, re.MULTILINE)
    assert whole == streamed
