"""What both ends of the pipes know: which peers there are, what a peer looks like in its process, and frames.

A frame is a header and arrays of token ids, pickled behind a mark. Both ends are ours and on one machine; the mark is
there because a library that prints to the wrong descriptor, or a process that dies half way, must be an error and not
a wrong figure.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from typing import IO, Any, Final, Protocol, Self

import numpy as np
import numpy.typing as npt

PEER_NAMES = ("arctic", "vllm-ngram", "prompt-lookup", "sglang-ngram", "llama-cpp")

TokenIds = npt.NDArray[np.int32]
_MARK: Final = b"PEER"

Setting = dict[str, float | str]
"""Names and values of a peer's own knobs; a boolean counts as a number, as it does in JSON and in Python."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Speculation:
    """One draft as the peer gave it."""

    ns: int
    """Nanoseconds of the peer's own call, nothing else."""
    token_ids: list[int]
    parents: list[int]
    """Index of each token's parent in ``token_ids``; -1 follows the context. A chain is -1, 0, 1, ..."""
    probs: list[float] | None = None
    """The peer's estimate that a token and all before it in its branch are accepted, where it gives one."""
    match_length: int | None = None
    """Length of the match the draft follows, where the peer tells."""


class LocalPeer(Protocol):
    """One drafter. Token ids are contiguous, writable int32[n]; the caller may not change them later."""

    distributions: tuple[str, ...]
    """What it is made of: the installed packages whose versions identify it."""
    has_store: bool
    """Whether it learns from finished requests; `insert` does nothing where it does not."""
    shares_state: bool
    """Whether what it knows depends on texts alone, so that several settings can draft from one memory."""
    full_draft: Setting
    """The setting under which a draft is only as short as ``max_tokens`` and the evidence make it."""

    def insert(self, sequence: TokenIds) -> tuple[int, int]:
        """Learn one finished request; returns (nanoseconds of its own calls, tokens now held for later requests)."""

    def apart(self, max_tokens: int, setting: Setting) -> Self:
        """Who drafts under a setting: itself where settings share a state, else a new peer that knows nothing."""

    def start(self, request_id: str, prompt: TokenIds) -> None:
        """Begin a request. Raises ValueError where one of that id runs."""

    def speculate(self, request_id: str, context: TokenIds, max_tokens: int, setting: Setting) -> Speculation:
        """Draft for a running request whose prompt and output so far are ``context``; timed inside."""

    def add(self, request_id: str, token_ids: TokenIds) -> None:
        """Tell a running request what was accepted."""

    def stop(self, request_id: str, keep: bool) -> None:
        """End a request; its output stays for later requests if ``keep``."""


def chain(num_tokens: int) -> list[int]:
    """Parents of a draft without branches."""
    return list(range(-1, num_tokens - 1))


class FrameError(Exception):
    """The stream is out of step, or ended inside a frame."""


def write_frame(stream: IO[bytes], header: dict[str, Any], arrays: Sequence[TokenIds] = ()) -> None:
    """Write one frame and flush. Raises TypeError for anything but int32 in one dimension."""
    for array in arrays:
        if array.dtype != np.int32 or array.ndim != 1:
            raise TypeError(f"token ids must be int32[n], got {array.dtype}{list(array.shape)}")
    stream.write(_MARK)
    pickle.dump((header, [array.tobytes() for array in arrays]), stream, protocol=5)
    stream.flush()


def read_frame(stream: IO[bytes]) -> tuple[dict[str, Any], list[TokenIds]] | None:
    """The next frame, or None where the stream ends between two frames; the arrays are contiguous and writable.

    Raises FrameError on anything else than a whole frame.
    """
    mark = stream.read(len(_MARK))
    if not mark:
        return None
    if mark != _MARK:
        raise FrameError(f"not a frame: {mark!r}")
    try:
        header, parts = pickle.load(stream)
        return header, [np.frombuffer(bytearray(part), np.int32) for part in parts]
    except (pickle.UnpicklingError, EOFError, ValueError, TypeError, AttributeError, KeyError, IndexError) as error:
        raise FrameError(f"the stream ended inside a frame, or holds another thing: {error}") from error
