"""The drafters of llama.cpp that need no model: those of llama-server's ``--spec-type`` and of llama-lookup."""

from __future__ import annotations

import ctypes
import sys
from typing import Any

import numpy as np

from benchmarks.peers.build import FOLDER, LLAMA_CPP_LIBRARY, require
from benchmarks.walk import Proposal, Setting, TokenIds

_LOOKUP = "lookup"
_POOL = "ngram-mod"
_DEFAULTS = {
    _POOL: (24, 48, 64),
    "ngram-simple": (12, 48, 1),
    "ngram-map-k": (12, 48, 1),
    "ngram-map-k4v": (12, 48, 1),
    "ngram-cache": (0, 0, 0),
    _LOOKUP: (0, 0, 0),
}
_SIZES = ("first", "second", "third")
_LONGEST = 1024  # what its options allow


class LlamaCpp:
    """A drafter of llama.cpp with one slot: a request must end before the next one begins.

    ``type`` is a value of ``--spec-type``, or ``lookup``:

    - ngram-mod: a pool of hashed n-grams and the tokens after them, shared by all requests; ``--spec-default`` selects
      it. A prompt is added when its request begins, and output in chunks of 32 tokens; an incomplete chunk never is.
    - ngram-simple, ngram-map-k, ngram-map-k4v: drafts from the request's own context. Each request gets a new state,
      because n-grams of an earlier request in the slot could only mislead.
    - ngram-cache: counts of n-grams of 1 to 4 tokens in the request's own context, with 8 tokens per draft. Each
      request gets a new state.
    - lookup: the same counts as in llama-lookup. When a request ends, its counts, prompt included, are merged into a
      dynamic cache that all later requests draft from.
    """

    distributions: tuple[str, ...] = ("llama-cpp-python", "numpy")

    def __init__(
        self, type: str = _POOL, first: int | None = None, second: int | None = None, third: int | None = None
    ) -> None:
        """Create a new state. Raises ValueError for invalid arguments and ImportError if the library was not built.

        ``first``, ``second`` and ``third`` are n_match, n_min and n_max of ngram-mod, and size_n, size_m and min_hits
        of ngram-simple and ngram-map-*. Their defaults are those of llama-server.
        """
        if type not in _DEFAULTS:
            raise ValueError(f"llama-cpp has no type {type!r}, only {', '.join(_DEFAULTS)}")
        sizes = [
            given if given is not None else own
            for given, own in zip((first, second, third), _DEFAULTS[type], strict=True)
        ]
        if any(not 0 <= size <= _LONGEST for size in sizes):
            raise ValueError(f"sizes of {type} must be within 0..{_LONGEST}, got {sizes}")
        sys.path.append(str(FOLDER))  # its metadata lie there
        self._library = ctypes.CDLL(str(require(LLAMA_CPP_LIBRARY)))
        for name in ("speculative_open", "lookup_open"):
            getattr(self._library, name).restype = ctypes.c_void_p
        self._type, self._sizes = type, sizes
        self._is_shared = type in (_POOL, _LOOKUP)
        self._state = self._open() if self._is_shared else None
        self._is_running = False
        self._num_drafted = 0
        self._draft = np.empty(_LONGEST + 1, np.int32)
        self._options: dict[str, Any] = {"type": type, **dict(zip(_SIZES, sizes, strict=True))}

    def apart(self, max_tokens: int, setting: Setting) -> LlamaCpp:
        options: dict[str, Any] = {**({} if "type" in setting else self._options), **setting}
        return LlamaCpp(**options)

    def start(self, request_id: str, prompt: TokenIds) -> None:
        if self._is_running:
            raise ValueError("a request is running, and there is one slot")
        if self._state is None:
            self._state = self._open()
        self._is_running, self._num_drafted = True, 0
        text = np.ascontiguousarray(prompt)
        begin = self._library.lookup_begin if self._type == _LOOKUP else self._library.speculative_begin
        begin(ctypes.c_void_p(self._state), *_sized(text))

    def speculate(self, request_id: str, context: TokenIds, max_tokens: int, setting: Setting) -> Proposal:
        if not len(context):
            return Proposal([])
        most = ctypes.c_int32(min(max_tokens, _LONGEST))
        if self._type == _LOOKUP:
            self._num_drafted = self._library.lookup_draft(ctypes.c_void_p(self._state), most, _pointer(self._draft))
        else:
            text = np.ascontiguousarray(context)
            self._num_drafted = self._library.speculative_draft(
                ctypes.c_void_p(self._state), *_sized(text), most, _pointer(self._draft)
            )
        return Proposal(self._draft[: self._num_drafted].tolist())

    def add(self, request_id: str, token_ids: TokenIds) -> None:
        """Report the tokens of a step; all but the last one were accepted draft tokens."""
        if self._type == _LOOKUP:
            tokens = np.ascontiguousarray(token_ids)
            self._library.lookup_add(ctypes.c_void_p(self._state), *_sized(tokens))
        elif self._num_drafted:
            accepted = min(self._num_drafted, len(token_ids) - 1)
            self._library.speculative_accept(ctypes.c_void_p(self._state), ctypes.c_int32(accepted))
        self._num_drafted = 0

    def stop(self, request_id: str) -> None:
        self._is_running = False
        if self._type == _LOOKUP:
            self._library.lookup_end(ctypes.c_void_p(self._state), ctypes.c_int32(True))
        elif not self._is_shared:
            self._library.speculative_close(ctypes.c_void_p(self._state))
            self._state = None

    def _open(self) -> int:
        if self._type == _LOOKUP:
            return int(self._library.lookup_open())
        sizes = [ctypes.c_int32(size) for size in self._sizes]
        opened = self._library.speculative_open(ctypes.c_char_p(self._type.encode()), *sizes)
        if opened is None:
            raise ValueError(f"llama.cpp did not open {self._type} with {self._sizes}")
        return int(opened)


def _pointer(array: TokenIds) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.ctypes.data)


def _sized(array: TokenIds) -> tuple[ctypes.c_void_p, ctypes.c_size_t]:
    """Return an array's pointer and length for a C function. The array must not be freed before the call returns."""
    return _pointer(array), ctypes.c_size_t(len(array))
