"""The retrieval cache as a library: an engine of a few lines drafts from it, and what it stores outlives it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ssd import CacheConfig, DraftConfig, RetrievalCache
from ssd.errors import ConfigError

VOCAB_SIZE, MAX_LENGTH, END = 1000, 200, 0


def opened(config: CacheConfig | None = None, **arguments: object) -> RetrievalCache:
    given = {"vocab_size": VOCAB_SIZE, "max_length": MAX_LENGTH, "end_of_text_ids": [END]} | arguments
    return RetrievalCache(config, **given)  # type: ignore[arg-type]


def decode(cache: RetrievalCache, texts: dict[str, tuple[list[int], list[int]]]) -> dict[str, int]:
    """Decode all requests (a prompt and the target's output) as one batch; return the number of steps of each."""
    for name, (prompt, _) in texts.items():
        cache.start(name, prompt)
    outputs: dict[str, list[int]] = {name: [] for name in texts}
    steps = dict.fromkeys(texts, 0)
    while running := [name for name in texts if len(outputs[name]) < len(texts[name][1])]:
        drafts, new = cache.speculate(running), []
        for name, draft in zip(running, drafts, strict=True):
            coming = texts[name][1][len(outputs[name]) :]
            agreed = next((k for k, pair in enumerate(zip(draft, coming, strict=False)) if len(set(pair)) > 1), None)
            accepted = min(len(draft), len(coming)) if agreed is None else agreed
            new.append(coming[: accepted + 1])
            outputs[name] += new[-1]
            steps[name] += 1
        lengths = cache.extend(running, new)
        assert lengths == [len(texts[name][0]) + len(outputs[name]) for name in running]
    for name in texts:
        cache.finish(name)
    assert outputs == {name: output for name, (_, output) in texts.items()}
    return steps


def text(seed: int, length: int = 60) -> list[int]:
    return np.random.default_rng(seed).integers(1, VOCAB_SIZE, length).tolist()


def test_a_repeated_request_takes_few_steps_also_after_a_restart(tmp_path: Path) -> None:
    config, request = CacheConfig(directory=tmp_path), {"a": (text(1, 20), text(2))}
    with opened(config, fingerprint="f" * 32) as cache:
        assert decode(cache, request) == {"a": 60}
        assert decode(cache, request)["a"] < 12
        stats = cache.stats()
        assert (stats.num_stored, stats.num_running) == (2, 0)
        assert 0 < stats.num_drafts <= stats.num_proposals <= 72
    with opened(config, fingerprint="f" * 32) as cache:
        assert cache.stats().num_cached_tokens >= 80
        assert decode(cache, request)["a"] < 12


@settings(max_examples=25, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 80)), min_size=1, max_size=20))
def test_batches_of_any_requests_get_the_targets_output(requests: list[tuple[int, int]]) -> None:
    with opened(draft=DraftConfig(num_speculative_tokens=7)) as cache:
        decode(cache, {f"{n}": (text(seed, 20), text(seed + 10, length)) for n, (seed, length) in enumerate(requests)})
        assert cache.stats().num_stored == len(requests)


def test_what_the_client_did_not_receive_is_not_stored() -> None:
    with opened() as cache:
        stored: list[list[int]] = []
        cache.cache.add_listener(lambda pieces: stored.extend(piece.tolist() for piece in pieces))
        cases = {"all": ([5, 6], None), "stopped": ([5, 6, 7, 8], 5), "ended": ([5, END, 7], None), "none": ([], None)}
        for name, (new, num_tokens) in cases.items():
            cache.start(name, [1, 2, 3, ord(name[0])])
            cache.extend([name], [new])
            cache.finish(name, num_tokens)
        ends = [ord("a"), 5, 6], [ord("s"), 5], [ord("e"), 5, END]
        assert stored == [[1, 2, 3, *end] for end in ends], "a prompt without output is not stored"


def test_requests_that_are_unknown_too_long_or_not_wanted_get_no_draft() -> None:
    with opened() as cache:
        decode(cache, {"a": (text(1, 20), text(2))})
        cache.start("a", text(1, 20))
        assert cache.extend(["unknown", "a"], [[1], [text(2)[0]]]) == [0, 21]
        assert cache.extend(["a"], [[1] * MAX_LENGTH]) == [21], "it does not fit"
        drafts = cache.speculate(["unknown", "a"])
        assert not drafts[0] and drafts[1] == text(2)[1 : 1 + len(drafts[1])] != []
        assert len(cache.speculate(["a"], limit=3)[0]) == 3
        assert cache.speculate(["a"], needs_draft=[False]) == [[]]
        assert cache.speculate([]) == []
        cache.start("a", text(1, 20)[:4], prompt_length=2)  # it begins again
        assert cache.extend(["a"], [[9]]) == [5]
        cache.finish("unknown")


def test_a_stored_cache_must_name_its_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="requires fingerprint"):
        opened(CacheConfig(directory=tmp_path))
