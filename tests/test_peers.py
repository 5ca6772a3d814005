"""Peers: the process behind them, children that fail, and each peer where its environment is installed."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from benchmarks.child import ChildEnded, ChildError
from benchmarks.peers import PEER_NAMES, Peer, PeerUnavailable
from benchmarks.peers.client import environment
from benchmarks.peers.local import Setting, Speculation, chain
from benchmarks.peers.process import WAYS, Server

needs_peers = pytest.mark.skipif(
    not (environment() / ".ready").exists(), reason="the peers are not installed: run `make bench-peers`"
)


def ids(*token_ids: int) -> np.ndarray:
    return np.array(token_ids, np.int32)


class Echo:
    """Learns sequences, drafts the end of the context."""

    distributions: tuple[str, ...] = ("numpy", "no-such-package")
    has_store = True
    full_draft: Setting = {"knob": 1.0}  # noqa: RUF012

    def __init__(self) -> None:
        self.running: list[str] = []

    def apart(self, max_tokens: int, setting: Setting) -> Echo:
        return self

    def insert(self, sequence: np.ndarray) -> tuple[int, int]:
        return 1000, len(sequence)

    def start(self, request_id: str, prompt: np.ndarray) -> None:
        assert request_id not in self.running
        self.running.append(request_id)

    def speculate(self, request_id: str, context: np.ndarray, max_tokens: int, setting: Setting) -> Speculation:
        assert request_id in self.running
        assert setting["knob"]
        draft = context[-max_tokens:].tolist()
        return Speculation(ns=2000, token_ids=draft, parents=chain(len(draft)))

    def add(self, request_id: str, token_ids: np.ndarray) -> None:
        assert request_id in self.running

    def stop(self, request_id: str, keep: bool) -> None:
        self.running.remove(request_id)


def test_every_proposed_context_is_a_request_that_ends() -> None:
    echo = Echo()
    times, drafts = Server(echo).propose([ids(1, 2, 3), ids(), ids(4)], 2, {"knob": 0.5})
    assert (times, [draft.tolist() for draft in drafts]) == ([2000] * 3, [[2, 3], [], [4]])
    assert echo.running == []


def test_a_recorded_request_is_decoded_under_several_settings_at_once() -> None:
    echo = Echo()
    server, text = Server(echo), ids(1, 1, 1, 1, 2, 1)
    one, two = server.replay("r", text, 2, [(most, {"knob": 0.5}) for most in (1, 2)])
    # It drafts what it just saw: right after 1 1 and 1 1 1, wrong before the 2 and after it.
    assert (one.drafted.tolist(), one.accepted.tolist()) == ([1, 1, 1], [1, 0, 0])
    assert (two.drafted.tolist(), two.accepted.tolist()) == ([2, 2], [2, 0])
    assert two.ns.tolist() == [2000, 2000]
    assert server.replay("r", text, 2, []) == [] and echo.running == []


# Children, with interpreters of our own behind them


@pytest.fixture
def fake_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An environment whose interpreter runs ``peer.py`` beside it with what `Child` appends."""
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.write_text(f'#!/bin/sh\nexec env PYTHONPATH="$PWD" "{sys.executable}" "{tmp_path}/peer.py" "$3"\n')
    python.chmod(0o755)
    monkeypatch.setenv("SSD_PEERS", str(tmp_path))
    return tmp_path


MADE = """
import os, sys
from benchmarks.child import serve
class Made:
    resident_bytes = 7
    def about(self):
        return {}, True, {}
    def insert(self, some):
        if not some:
            raise ValueError("nothing")
        for n in range(20):
            print("line", n, flush=True)
        os._exit(7)
sys.exit(serve(lambda name, options: Made()))
"""


def test_an_absent_environment_says_how_to_make_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SSD_PEERS", str(tmp_path / "nowhere"))
    with pytest.raises(PeerUnavailable, match="make bench-peers"):
        Peer("arctic")


def test_a_peer_that_does_not_start_shows_its_last_words(fake_environment: Path) -> None:
    (fake_environment / "peer.py").write_text("import sys\nsys.exit('the library is from another planet')\n")
    with pytest.raises(PeerUnavailable, match=r"(?s)status 1 during 'open'.*another planet.*make bench-peers"):
        Peer("arctic")


def test_what_fails_can_be_asked_again_and_who_dies_shows_only_its_last_words(fake_environment: Path) -> None:
    (fake_environment / "peer.py").write_text(MADE)
    with Peer("arctic") as peer:
        with pytest.raises(ChildError, match=r"insert: ValueError: nothing$"):
            peer.ask("insert", [])
        assert peer.ask("resident_bytes") == 7
        with pytest.raises(ChildEnded, match=r"(?s)status 7 during 'insert'.*line 19") as caught:
            peer.insert([ids(1)])
        assert "line 12\n" in str(caught.value) and "line 11\n" not in str(caught.value)
        with pytest.raises(ChildEnded, match="closed"):
            peer.insert([ids(1)])


# The peers themselves


# Capacity: sglang's trie has all of its nodes from the beginning.
WAYS_TO_RUN = [
    (name, {**options, **({"capacity": 100_000} if name == "sglang-ngram" else {})})
    for name in PEER_NAMES
    for options in WAYS.get(name, [{}])
]


@pytest.fixture(scope="module", params=WAYS_TO_RUN, ids=lambda way: " ".join(map(str, (way[0], *way[1].values()))))
def peer(request: pytest.FixtureRequest) -> Iterator[Peer]:
    name, options = request.param
    with Peer(name, **options) as peer:
        yield peer


def texts(num_texts: int, length: int, seed: int) -> list[np.ndarray]:
    """Random texts in which five tokens hardly ever stand in the same order twice."""
    return list(np.random.default_rng(seed).integers(0, 30_000, (num_texts, length)).astype(np.int32))


@needs_peers
def test_a_peer_continues_what_its_own_context_repeats(peer: Peer) -> None:
    period = texts(1, 40, seed=1)[0]
    context = np.concatenate([period, period, period[:20]])
    proposals = peer.propose([context, texts(1, 50, seed=2)[0]], max_tokens=8)
    assert proposals.drafts[0].tolist() == period[20:28].tolist()
    assert proposals.drafts[1].tolist() == []
    assert proposals.us.dtype == np.float64
    assert proposals.us.shape == (2,)
    assert (proposals.us > 0).all()


@needs_peers
def test_arctic_drafts_what_followed_in_a_finished_request() -> None:
    stored = texts(200, 1_000, seed=5)
    with Peer("arctic", depth=24) as peer:
        insertion = peer.insert(text for text in stored)
        assert insertion.num_tokens == 200 * (1_000 - 32)
        assert insertion.seconds > 0
        # A random text costs a suffix tree at least a node a token; how much is for the benchmark to say.
        assert insertion.resident_growth_bytes > 16 * insertion.num_tokens
        proposals = peer.propose([text[480:500] for text in stored], max_tokens=4)
        assert [draft.tolist() for draft in proposals.drafts] == [text[500:504].tolist() for text in stored]


NONE: Setting = {}
TREES: Setting = {"max_spec_factor": 2.0, "use_tree_spec": True}


@needs_peers
def test_arctic_and_sglang_draft_every_known_continuation_as_a_tree() -> None:
    told = [ids(50, 1, 2, 3, 4, 5, 0), ids(60, 1, 2, 3, 7, 8, 0)]
    asked = ids(70, 1, 2, 3, 4, 9)
    for name, options, setting in (
        ("arctic", {"prompt_length": 0}, TREES),
        ("sglang-ngram", {"capacity": 10_000}, NONE),
    ):
        with Peer(name, **options) as peer:
            for number, text in enumerate(told):
                peer.replay(f"told {number}", text, 1, [(8, setting)])
            (steps,) = peer.replay("asked", asked, 4, [(8, setting)])
            assert steps.drafted[0] >= 2 and steps.accepted[0] == 1, name


@needs_peers
def test_llama_cpp_refuses_what_it_does_not_know() -> None:
    with pytest.raises(ChildError, match="ngram-map-k4v"):
        Peer("llama-cpp", type="draft-simple")
    with pytest.raises(ChildError, match=r"0\.\.1024"):
        Peer("llama-cpp", type="ngram-mod", first=5000)
