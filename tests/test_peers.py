"""Peers: frames on a pipe, the process behind them, and each peer where its environment is installed."""

from __future__ import annotations

import io
import pickle
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.peers import PEER_NAMES, Peer, PeerError, PeerUnavailable
from benchmarks.peers.check import WAYS
from benchmarks.peers.client import environment
from benchmarks.peers.local import FrameError, Setting, Speculation, chain, read_frame, write_frame
from benchmarks.peers.process import Server, serve
from benchmarks.walk import Steps

needs_peers = pytest.mark.skipif(
    not (environment() / ".ready").exists(), reason="the peers are not installed: run `make bench-peers`"
)


def ids(*token_ids: int) -> np.ndarray:
    return np.array(token_ids, np.int32)


def frame_of(header: dict[str, Any], arrays: tuple[np.ndarray, ...] = ()) -> bytes:
    stream = io.BytesIO()
    write_frame(stream, header, arrays)
    return stream.getvalue()


# Frames


def test_frames_come_back_as_they_were_written() -> None:
    stream = io.BytesIO(frame_of({"op": "a"}, (ids(1, -2), ids(), ids(2**31 - 1))) + frame_of({"op": "b"}))
    header, arrays = read_frame(stream) or ({}, [])
    assert header == {"op": "a"}
    assert [array.tolist() for array in arrays] == [[1, -2], [], [2**31 - 1]]
    assert read_frame(stream) == ({"op": "b"}, [])
    assert read_frame(stream) is None


@pytest.mark.parametrize("array", [np.zeros(3, np.int64), np.zeros((2, 2), np.int32)], ids=["int64", "two dimensions"])
def test_anything_but_int32_in_a_row_is_refused(array: np.ndarray) -> None:
    with pytest.raises(TypeError, match="int32"):
        frame_of({}, (array,))


def test_a_frame_cut_anywhere_is_an_error() -> None:
    whole = frame_of({"op": "insert"}, (ids(1, 2), ids(3)))
    for length in range(1, len(whole)):
        with pytest.raises(FrameError):
            read_frame(io.BytesIO(whole[:length]))


@pytest.mark.parametrize(
    "stream",
    [b"Loading weights: 100%\n".ljust(64), b"PEER", b"PEERLoading weights", b"PEER" + pickle.dumps([]), b"PE"],
    ids=["chatter", "nothing", "mark and chatter", "list", "torn mark"],
)
def test_what_is_not_a_frame_is_an_error(stream: bytes) -> None:
    with pytest.raises(FrameError):
        read_frame(io.BytesIO(stream))


# The process, with a drafter of our own in it


class Echo:
    """Learns sequences, drafts the end of the context."""

    distributions: tuple[str, ...] = ("numpy", "no-such-package")
    has_store = True
    full_draft: Setting = {"knob": 1.0}  # noqa: RUF012

    def __init__(self, *, shares_state: bool = True) -> None:
        self.running: list[str] = []
        self.held = 0
        self.shares_state = shares_state
        self.others: list[Echo] = []

    def apart(self, max_tokens: int, setting: Setting) -> Echo:
        if not self.shares_state:
            self.others.append(Echo(shares_state=False))
            return self.others[-1]
        return self

    def insert(self, sequence: np.ndarray) -> tuple[int, int]:
        self.held += len(sequence)
        return 1000, len(sequence)

    def start(self, request_id: str, prompt: np.ndarray) -> None:
        if request_id in self.running:
            raise ValueError(f"{request_id} runs")
        self.running.append(request_id)

    def speculate(self, request_id: str, context: np.ndarray, max_tokens: int, setting: Setting) -> Speculation:
        assert request_id in self.running
        draft, knob = context[-max_tokens:].tolist(), float(setting["knob"])
        return Speculation(ns=2000, token_ids=draft, parents=chain(len(draft)), probs=[knob] * len(draft))

    def add(self, request_id: str, token_ids: np.ndarray) -> None:
        assert request_id in self.running
        self.held += len(token_ids)

    def stop(self, request_id: str, keep: bool) -> None:
        self.running.remove(request_id)


def answers_to(*frames: bytes, peer: Echo | None = None) -> list[tuple[dict[str, Any], list[list[int]]]]:
    """What the process answers, opened first."""
    out = io.BytesIO()
    opened = frame_of({"op": "open", "peer": "echo", "options": {}})
    serve(io.BytesIO(opened + b"".join(frames)), out, Server(lambda header: peer or Echo()))
    out.seek(0)
    answers = []
    while (frame := read_frame(out)) is not None:
        answers.append((frame[0], [array.tolist() for array in frame[1]]))
    return answers


def test_the_process_says_what_it_opened() -> None:
    [(opened, _)] = answers_to()
    assert opened["versions"] == {"numpy": np.__version__, "no-such-package": "absent"}
    assert opened["has_store"] is True
    assert opened["full_draft"] == {"knob": 1.0}


def test_every_proposed_context_is_a_request_that_ends() -> None:
    echo = Echo()
    ask = frame_of({"op": "propose", "max_tokens": 2, "setting": {"knob": 0.5}}, (ids(1, 2, 3), ids(), ids(4)))
    _, first, second = answers_to(ask, ask, peer=echo)
    assert first == second == ({"ns": [2000] * 3}, [[2, 3], [], [4]])
    assert echo.running == []


def test_a_request_is_decoded_step_by_step() -> None:
    _, started, drafted, added, stopped = answers_to(
        frame_of({"op": "start", "request_id": "r"}, (ids(1, 2),)),
        frame_of({"op": "speculate", "request_id": "r", "max_tokens": 2, "setting": {"knob": 0.5}}, (ids(7, 8, 9),)),
        frame_of({"op": "add", "request_id": "r"}, (ids(8),)),
        frame_of({"op": "stop", "request_id": "r", "keep": True}),
    )
    assert started == added == stopped == ({}, [])
    assert drafted == ({"ns": 2000, "probs": [0.5, 0.5], "match_length": None}, [[8, 9], [-1, 0]])


def test_a_recorded_request_is_decoded_under_several_settings_at_once() -> None:
    echo = Echo()
    settings = [{"max_tokens": most, "setting": {"knob": 0.5}} for most in (1, 2)]
    ask = {"op": "replay", "request_id": "r", "prompt_length": 2, "settings": settings}
    _, (_, arrays), (_, nothing) = answers_to(
        frame_of(ask, (ids(1, 1, 1, 1, 2, 1),)),
        frame_of({**ask, "settings": []}, (ids(1, 1, 1, 1, 2, 1),)),
        peer=echo,
    )
    one, two = (Steps.from_arrays([np.array(a, np.int32) for a in some]) for some in (arrays[:6], arrays[6:]))
    # It drafts what it just saw: right after 1 1 and 1 1 1, wrong before the 2 and after it.
    assert (one.drafted.tolist(), one.accepted.tolist()) == ([1, 1, 1], [1, 0, 0])
    assert (two.drafted.tolist(), two.accepted.tolist()) == ([2, 2], [2, 0])
    assert two.ns.tolist() == [2000, 2000]
    # 0.5 each for whole branches, so the second token of a draft is certain once the first was accepted.
    assert two.estimates.tolist() == [0.5, 1.0, 0.5]
    assert two.hits.tolist() == [1, 1, 1]
    assert nothing == []
    assert echo.running == []


def test_a_failed_operation_is_an_answer_and_the_next_one_works() -> None:
    start = frame_of({"op": "start", "request_id": "r"}, (ids(1),))
    _, first, second, unknown, last = answers_to(
        start, start, frame_of({"op": "no-such"}), frame_of({"op": "stop", "request_id": "r", "keep": False})
    )
    assert first == last == ({}, [])
    assert second[0] == {"error": "ValueError: r runs", "missing": False}
    assert "KeyError" in unknown[0]["error"]


# The client, with interpreters of our own behind it


@pytest.fixture
def fake_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An environment whose interpreter runs ``peer.py`` beside it, whatever it was told to run."""
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{tmp_path}/peer.py"\n')
    python.chmod(0o755)
    monkeypatch.setenv("SSD_PEERS", str(tmp_path))
    return tmp_path


ANSWER_OPEN = """
import os, sys
sys.path.insert(0, os.getcwd())
from benchmarks.peers.local import read_frame, write_frame
def answer(header):
    write_frame(sys.stdout.buffer, header)
read_frame(sys.stdin.buffer)
answer({"versions": {}, "has_store": True, "shares_state": True, "full_draft": {}})
"""


def test_an_absent_environment_says_how_to_make_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SSD_PEERS", str(tmp_path / "nowhere"))
    with pytest.raises(PeerUnavailable, match="make bench-peers"):
        Peer("arctic")


def test_a_peer_that_does_not_start_shows_its_last_words(fake_environment: Path) -> None:
    (fake_environment / "peer.py").write_text("import sys\nsys.exit('the library is from another planet')\n")
    with pytest.raises(PeerUnavailable, match=r"(?s)status 1 during 'open'.*make bench-peers.*another planet"):
        Peer("arctic")


def test_a_peer_that_dies_in_a_call_shows_only_its_last_words(fake_environment: Path) -> None:
    die = 'read_frame(sys.stdin.buffer)\nfor n in range(20):\n    print("line", n, file=sys.stderr)\nos._exit(7)\n'
    (fake_environment / "peer.py").write_text(ANSWER_OPEN + die)
    with Peer("arctic") as peer:
        with pytest.raises(PeerUnavailable, match=r"(?s)status 7 during 'start'.*line 19") as caught:
            peer.start("r", ids(1))
        assert "line 12\n" in str(caught.value)
        assert "line 11\n" not in str(caught.value)
        with pytest.raises(PeerUnavailable, match="closed"):
            peer.start("r", ids(1))


def test_chatter_on_the_pipe_ends_the_peer(fake_environment: Path) -> None:
    chatter = 'read_frame(sys.stdin.buffer)\nprint("hello, I am a library", flush=True)\nsys.stdin.buffer.read()\n'
    (fake_environment / "peer.py").write_text(ANSWER_OPEN + chatter)
    with Peer("arctic") as peer, pytest.raises(PeerUnavailable) as caught:
        peer.stop("r", keep=True)
    assert "not a frame" in str(caught.value.__cause__)


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
def test_a_peer_drafts_step_by_step(peer: Peer) -> None:
    period = texts(1, 30, seed=3)[0]
    context = np.concatenate([period, period[:10]])
    peer.start("step", context)
    first = peer.speculate("step", context, 4)
    assert first.token_ids.tolist() == period[10:14].tolist()
    assert first.parents.tolist() == [-1, 0, 1, 2]
    assert first.us > 0
    peer.add("step", period[10:12])
    longer = np.concatenate([context, period[10:12]])
    assert peer.speculate("step", longer, 4).token_ids.tolist() == period[12:16].tolist()
    peer.stop("step", keep=False)
    with pytest.raises(PeerError, match="step"):
        peer.speculate("step", context, 4)


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


@needs_peers
def test_arctic_drafts_trees_and_obeys_its_settings() -> None:
    stem, one, other = texts(3, 20, seed=9)
    with Peer("arctic", prompt_length=0) as peer:
        peer.insert([np.concatenate([stem, one]), np.concatenate([stem, other])])
        peer.start("r", stem)
        tree = peer.speculate("r", stem, 6, max_spec_factor=2.0, min_token_prob=0.1, use_tree_spec=True)
        assert sorted(tree.token_ids[tree.parents == -1].tolist()) == sorted([int(one[0]), int(other[0])])
        assert tree.probs is not None
        assert tree.probs.tolist() == [0.5] * 6
        assert tree.match_length == 19
        assert peer.speculate("r", stem, 6, min_token_prob=0.6).token_ids.tolist() == []
        assert len(peer.speculate("r", stem[-4:], 6).token_ids) == 3  # no longer than its match
        peer.stop("r", keep=False)


def answer_of(peer: Peer, text: np.ndarray, max_tokens: int) -> tuple[list[int], list[int]]:
    """Tokens and parents of one draft of a request that leaves nothing behind."""
    peer.start("asked", text)
    draft = peer.speculate("asked", text, max_tokens)
    peer.stop("asked", keep=False)
    return draft.token_ids.tolist(), draft.parents.tolist()


def tell(peer: Peer, prompt: np.ndarray, output: np.ndarray) -> None:
    """A request decoded token by token, then kept."""
    peer.start("told", prompt)
    text = np.concatenate([prompt, output])
    for position in range(len(prompt), len(text)):
        peer.speculate("told", text[:position], 4)
        peer.add("told", text[position : position + 1])
    peer.stop("told", keep=True)


@needs_peers
def test_sglang_drafts_every_known_continuation_the_newest_first() -> None:
    with Peer("sglang-ngram", capacity=10_000, draft_tokens=9) as peer:
        tell(peer, ids(50), ids(1, 2, 3, 4, 5))
        tell(peer, ids(60), ids(1, 2, 3, 7, 8))
        tokens, parents = answer_of(peer, ids(1, 2, 3), 8)
        assert sorted(tokens) == [4, 5, 7, 8]
        assert sorted(tokens[index] for index, parent in enumerate(parents) if parent == -1) == [4, 7]
        assert {tokens[index]: tokens[parent] for index, parent in enumerate(parents) if parent >= 0} == {5: 4, 8: 7}
        assert answer_of(peer, ids(9), 8) == ([], [])
    with Peer("sglang-ngram", capacity=10_000, draft_tokens=3, max_bfs_breadth=1) as peer:
        tell(peer, ids(50), ids(1, 2, 3, 4, 5))
        tell(peer, ids(60), ids(1, 2, 3, 7, 8))
        assert answer_of(peer, ids(1, 2, 3), 8) == ([7, 8], [-1, 0])


@needs_peers
def test_llama_cpp_has_one_slot_and_refuses_what_it_does_not_know() -> None:
    with Peer("llama-cpp") as peer:
        peer.start("one", ids(1, 2))
        with pytest.raises(PeerError, match="one slot"):
            peer.start("other", ids(1, 2))
    with pytest.raises(PeerError, match="ngram-map-k4v"):
        Peer("llama-cpp", type="draft-simple")
    with pytest.raises(PeerError, match=r"0\.\.1024"):
        Peer("llama-cpp", type="ngram-mod", first=5000)
