"""Peers: texts walked with drafts, the process behind a peer, children that fail, each peer where it is installed."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.child import ChildEnded, ChildError
from benchmarks.peers.client import Peer, PeerUnavailable, environment
from benchmarks.peers.process import PEERS, TEXT, WAYS, Server
from benchmarks.walk import Proposal, Setting, agreeing, walk
from tests.reference import walk as reference

needs_peers = pytest.mark.skipif(
    not (environment() / ".ready").exists(), reason="the peers are not installed: run `make bench-peers`"
)


def ids(*token_ids: int) -> np.ndarray:
    return np.array(token_ids, np.int32)


class Echo:
    """Learns sequences, drafts the end of the context."""

    distributions: tuple[str, ...] = ("numpy", "no-such-package")

    def __init__(self) -> None:
        self.running: list[str] = []

    def apart(self, max_tokens: int, setting: Setting) -> Echo:
        return self

    def start(self, request_id: str, prompt: np.ndarray) -> None:
        assert request_id not in self.running
        self.running.append(request_id)

    def speculate(self, request_id: str, context: np.ndarray, max_tokens: int, setting: Setting) -> Proposal:
        assert request_id in self.running
        assert setting["knob"]
        return Proposal(context[-max_tokens:].tolist())

    def add(self, request_id: str, token_ids: np.ndarray) -> None:
        assert request_id in self.running

    def stop(self, request_id: str) -> None:
        self.running.remove(request_id)


def test_a_recorded_request_is_decoded_under_several_settings_at_once() -> None:
    echo = Echo()
    server, text = Server(echo), ids(1, 1, 1, 1, 2, 1)
    one, two = server.replay("r", text, 2, [(most, {"knob": 0.5}) for most in (1, 2)])
    # It drafts what it just saw: right after 1 1 and 1 1 1, wrong before the 2 and after it.
    assert (one.drafted.tolist(), one.accepted.tolist()) == ([1, 1, 1], [1, 0, 0])
    assert (two.drafted.tolist(), two.accepted.tolist()) == ([2, 2], [2, 0])
    assert echo.running == []


# A text walked with drafts

TOKENS = st.lists(st.integers(0, 2), max_size=8)
TEXTS = st.lists(st.integers(0, 2), min_size=1, max_size=12)


@st.composite
def trees(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    """Tokens and parents of a tree of at most eight nodes; siblings may be equal."""
    token_ids = draw(TOKENS)
    return token_ids, [draw(st.integers(-1, index - 1)) for index in range(len(token_ids))]


class Scripted:
    """Drafts what it is told to, by position, and notes what it is told back."""

    def __init__(self, drafts: Sequence[tuple[list[int], list[int]]]) -> None:
        self.drafts = drafts
        self.asked: list[int] = []

    def draft(self, position: int) -> tuple[list[int], list[int]]:
        return self.drafts[position % len(self.drafts)]

    def ask(self, position: int) -> Proposal:
        self.asked.append(position)
        token_ids, parents = self.draft(position)
        return Proposal(token_ids, parents)


@given(trees(), TEXTS, st.integers(0, 12))
def test_a_tree_is_verified_as_its_branches_are(tree: tuple[list[int], list[int]], text: list[int], at: int) -> None:
    position = min(at, len(text))
    assert agreeing(*tree, text, position) == reference.longest_agreeing(*tree, text[position:])
    chain = range(-1, len(tree[0]) - 1)
    assert agreeing(tree[0], None, text, position) == agreeing(tree[0], chain, text, position)


@given(st.lists(st.lists(trees(), min_size=1, max_size=4), max_size=3), TEXTS, st.integers(0, 12))
def test_drafters_side_by_side_are_each_walked_as_alone(
    drafts: list[list[tuple[list[int], list[int]]]], text: list[int], at: int
) -> None:
    prompt_length = min(at, len(text))
    askers = [Scripted(some) for some in drafts]
    together = walk(text, prompt_length, [asker.ask for asker in askers])
    for asker, steps in zip(askers, together, strict=True):
        expected = reference.decode(text, prompt_length, asker.draft)
        assert list(zip(steps.drafted.tolist(), steps.accepted.tolist(), strict=True)) == expected
        assert int(steps.accepted.sum()) + len(steps.accepted) == len(text) - prompt_length
        assert asker.asked == sorted(asker.asked)
        assert len(asker.asked) == len(steps.drafted)


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
    versions = {"made": "7"}
    def replay(self, *asked):
        if not len(asked[1]):
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
        with pytest.raises(ChildError, match=r"replay: ValueError: nothing$"):
            peer.replay("r", ids(), 0, [])
        assert peer.ask("versions") == {"made": "7"}
        with pytest.raises(ChildEnded, match=r"(?s)status 7 during 'replay'.*line 19") as caught:
            peer.replay("r", ids(1), 0, [])
        assert "line 12\n" in str(caught.value) and "line 11\n" not in str(caught.value)
        with pytest.raises(ChildEnded, match="closed"):
            peer.replay("r", ids(1), 0, [])


# The peers themselves


@needs_peers
@pytest.mark.parametrize("name", PEERS)
def test_a_peer_continues_what_its_own_context_repeats_and_nothing_else(name: str) -> None:
    capacity = {"capacity": 100_000} if name == "sglang" else {}  # its trie has all nodes from the beginning
    for options in WAYS.get(name, [{}]):
        with Peer(name, **options, **capacity) as peer:
            (steps,) = peer.replay("repeats", TEXT, 35, [(5, {})])
            assert steps.accepted[0] == 5
        with Peer(name, **options, **capacity) as peer:
            random = np.random.default_rng(2).permutation(1000).astype(np.int32)
            (steps,) = peer.replay("never", random[:60], 50, [(5, {})])
            assert not steps.accepted.any()


@needs_peers
def test_arctic_drafts_what_followed_in_a_finished_request() -> None:
    text = np.random.default_rng(5).permutation(1000).astype(np.int32)
    with Peer("arctic", depth=24) as peer:
        first, again = (peer.replay(name, text, 100, [(4, {})])[0] for name in ("first", "again"))
    assert not first.accepted.any() and again.accepted.max() == 4


@needs_peers
def test_settings_of_arctic_that_differ_in_depth_have_trees_of_their_own() -> None:
    text = np.random.default_rng(5).permutation(1000).astype(np.int32)
    setting: Setting = {"max_spec_factor": 8.0}
    with Peer("arctic") as peer:
        peer.replay("first", text, 100, [(16, setting), (16, {**setting, "depth": 8})])
        deep, flat = peer.replay("again", text, 100, [(16, setting), (16, {**setting, "depth": 8})])
    assert deep.accepted.max() == 16 and 0 < flat.accepted.max() < 8


NONE: Setting = {}
TREES: Setting = {"max_spec_factor": 2.0, "use_tree_spec": True}


@needs_peers
def test_arctic_and_sglang_draft_every_known_continuation_as_a_tree() -> None:
    told = [ids(50, 1, 2, 3, 4, 5, 0), ids(60, 1, 2, 3, 7, 8, 0)]
    asked = ids(70, 1, 2, 3, 4, 9)
    for name, options, setting in (
        ("arctic", {}, TREES),
        ("sglang", {"capacity": 10_000}, NONE),
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
