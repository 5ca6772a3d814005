"""Acceptance models as objects, one a namespace: made, kept as bytes, restored, published."""

from __future__ import annotations

import logging
import struct
import time
from typing import Final, Self
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt
import xxhash

from ssd.compiled.addresses import address
from ssd.drafting.acceptance import (
    ENTRIES,
    INPUTS,
    KNOTS,
    MODEL_FLOATS,
    NUM_LEARNED,
    SETS,
    WHEN_SETS,
    prior_model,
    within_reach,
)
from ssd.retrieval.cache_state import LearnedState

log = logging.getLogger(__name__)
_MAGIC: Final = b"SSDACC\r\n"
_VERSION: Final = 4
_HEADER: Final = struct.Struct("<8sIIIId")  # magic, version, entries, sets, inputs, candidates learned from
_CHECKSUM: Final = struct.Struct("<Q")
_NUM_FLOATS: Final = 2 * ENTRIES + NUM_LEARNED
_NUM_KNOTS: Final = WHEN_SETS * KNOTS
_SIZE: Final = _HEADER.size + 4 * _NUM_FLOATS + _CHECKSUM.size
_prior: npt.NDArray[np.float64] | None = None


class AcceptanceModel:
    """Tables, mixer weights and curves of one namespace, which the kernels read and change at ``address``.

    Bounded: MODEL_FLOATS numbers, whatever was learned. Made with the prior. Owned by one drafter; other threads get
    copies.
    """

    def __init__(self, numbers: npt.NDArray[np.float64] | None = None) -> None:
        """``numbers`` : float64[MODEL_FLOATS], copied; None takes the prior's."""
        global _prior
        if _prior is None:
            _prior = prior_model()
        self._buffer = (_prior if numbers is None else numbers).copy()
        assert len(self._buffer) == MODEL_FLOATS
        self.address = address(self._buffer)

    @classmethod
    def of(cls, learned: LearnedState) -> Self:
        """A model that goes on where the copy published last ends, else what was stored, else the prior."""
        if isinstance(learned.newest, AcceptanceModel):
            return cls(learned.newest._buffer)
        try:
            return cls() if learned.stored is None else cls.from_bytes(learned.stored)
        except ValueError as error:
            log.warning("what was learned beside the text is not used, it begins anew: %s", error)
            return cls()

    def copy(self) -> Self:
        """What was learned so far, never to be changed: the kernels must not get its address. O(MODEL_FLOATS)."""
        copied = type(self)(self._buffer)
        copied._buffer.setflags(write=False)
        return copied

    @property
    def num_learned(self) -> int:
        """Candidates learned from."""
        return int(self._buffer[-1])

    def to_bytes(self) -> bytes:
        """Header, chances, counts, weights and curves as little-endian float32, xxh3 checksum of all before it."""
        header = _HEADER.pack(_MAGIC, _VERSION, ENTRIES, SETS, INPUTS, self._buffer[-1])
        kept = np.concatenate([self._buffer[: 2 * ENTRIES], self._buffer[3 * ENTRIES : -1]])
        body = header + kept.astype("<f4").tobytes()
        return body + _CHECKSUM.pack(xxhash.xxh3_64_intdigest(body))

    @classmethod
    def from_bytes(cls, stored: bytes) -> Self:
        """Restore what ``to_bytes`` kept. Raises ValueError when it is not that, or of another version.

        A right checksum says nothing of who wrote it: numbers that learning cannot come to are brought within what it
        can. So whatever is restored, what comes true again and again is drafted again.
        """
        if len(stored) != _SIZE or stored[:8] != _MAGIC:
            raise ValueError(f"not an acceptance model of this version: {len(stored)} bytes, expected {_SIZE}")
        body, (checksum,) = stored[: -_CHECKSUM.size], _CHECKSUM.unpack(stored[-_CHECKSUM.size :])
        if xxhash.xxh3_64_intdigest(body) != checksum:
            raise ValueError("the acceptance model's checksum does not fit")
        _, version, entries, sets, inputs, num_learned = _HEADER.unpack_from(body)
        if (version, entries, sets, inputs) != (_VERSION, ENTRIES, SETS, INPUTS):
            raise ValueError(f"the acceptance model has version {version}, expected {_VERSION}")
        kept = np.frombuffer(body, "<f4", _NUM_FLOATS, _HEADER.size).astype(np.float64)
        if not np.isfinite(kept).all() or not 0 <= num_learned < 2**53:
            raise ValueError("the acceptance model holds numbers that cannot be")
        chances, counts, weights, knots = within_reach(
            kept[:ENTRIES], kept[ENTRIES : 2 * ENTRIES], kept[2 * ENTRIES : -_NUM_KNOTS], kept[-_NUM_KNOTS:]
        )
        model = cls()
        log_odds = np.log(chances / (1 - chances))
        model._buffer[:] = np.concatenate([chances, counts, log_odds, weights, knots, [num_learned]])
        return model


PUBLISH_S: Final = 10.0
"""A copy takes about 0.1 ms, and 1.5 ms where its memory is new: of 256 busy namespaces at most 4 % of the time."""


class NamespaceModels:
    """Acceptance models by namespace, each changed by one drafter only. No locks: owned by the drafter's thread.

    What a namespace learned is published when a request of it ends and the last copy is PUBLISH_S old, and by
    ``publish``. A model is forgotten with its namespace.
    """

    def __init__(self) -> None:
        self._own = self._last_model = AcceptanceModel()
        self._last: LearnedState | None = None
        self._models: WeakKeyDictionary[LearnedState, AcceptanceModel] = WeakKeyDictionary()
        self._published: WeakKeyDictionary[LearnedState, tuple[float, int]] = WeakKeyDictionary()

    def of(self, learned: LearnedState | None) -> AcceptanceModel:
        """The model of a namespace; with None that of all requests that have none. O(1) but for a new one."""
        if learned is None:
            return self._own
        if learned is not self._last:
            model = self._models.get(learned)
            if model is None:
                model = self._models[learned] = AcceptanceModel.of(learned)
                self._published[learned] = time.monotonic(), model.num_learned
            self._last, self._last_model = learned, model
        return self._last_model

    def ended(self, learned: LearnedState | None) -> None:
        """A request of this namespace has ended: publish what was learned if that is due."""
        published = None if learned is None else self._published.get(learned)  # None where it was never drafted for
        if learned is not None and published is not None and time.monotonic() - published[0] >= PUBLISH_S:
            self._publish(learned)

    def publish(self) -> None:
        """Publish all that was learned since the last copies."""
        for learned in list(self._models):
            self._publish(learned)

    def _publish(self, learned: LearnedState) -> None:
        model, (_, num_published) = self._models[learned], self._published[learned]
        if model.num_learned != num_published:
            learned.publish(model.copy())
            self._published[learned] = time.monotonic(), model.num_learned
