"""Create, serialize, restore and publish acceptance models, one per namespace."""

from __future__ import annotations

import logging
import struct
import time
from typing import Final, Self
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt
import xxhash

from ssd.drafting.acceptance_features import (
    DEPTH_BUCKETS,
    ENTRIES,
    KNOTS,
    MODEL_FLOATS,
    NUM_FEATURES,
    NUM_LEARNED,
    NUM_WEIGHT_SETS,
)
from ssd.drafting.acceptance_mixing import clip_to_learnable, prior_model
from ssd.jit.addresses import address
from ssd.retrieval.cache_state import LearnedState

log = logging.getLogger(__name__)
_MAGIC: Final = b"SSDACC\r\n"
_VERSION: Final = 4
_HEADER: Final = struct.Struct("<8sIIIId")  # magic, version, entries, sets, inputs, candidates learned from
_CHECKSUM: Final = struct.Struct("<Q")
_NUM_FLOATS: Final = 2 * ENTRIES + NUM_LEARNED
_NUM_KNOTS: Final = DEPTH_BUCKETS * KNOTS
_SIZE: Final = _HEADER.size + 4 * _NUM_FLOATS + _CHECKSUM.size
_prior: npt.NDArray[np.float64] | None = None


class AcceptanceModel:
    """The acceptance model of one namespace, which estimates the probability that the target accepts a candidate token.

    Numba kernels read and update its parameters at ``address``. Its size is constant. One drafter owns the model; other
    threads get copies.
    """

    def __init__(self, numbers: npt.NDArray[np.float64] | None = None) -> None:
        """Copy the parameters ``numbers`` of another model (float64[MODEL_FLOATS]), or create an untrained model."""
        global _prior
        if _prior is None:
            _prior = prior_model()
        self._buffer = (_prior if numbers is None else numbers).copy()
        assert len(self._buffer) == MODEL_FLOATS
        self.address = address(self._buffer)

    @classmethod
    def load(cls, learned: LearnedState) -> Self:
        """Load a namespace's acceptance model: the last published copy, or the one on disk, or an untrained model."""
        if isinstance(learned.newest, AcceptanceModel):
            return cls(learned.newest._buffer)
        try:
            return cls() if learned.stored is None else cls.from_bytes(learned.stored)
        except ValueError as error:
            log.warning(
                "the stored acceptance model of a namespace cannot be used: %s. A new model is trained instead "
                "(nothing to do)",
                error,
            )
            return cls()

    def copy(self) -> Self:
        """Return a copy in read-only memory. Do not pass the copy's address to numba kernels that update a model."""
        copied = type(self)(self._buffer)
        copied._buffer.setflags(write=False)
        return copied

    @property
    def num_learned(self) -> int:
        """Return the number of candidate tokens whose outcomes the acceptance model has learned from."""
        return int(self._buffer[-1])

    def to_bytes(self) -> bytes:
        """Serialize the acceptance model: a header, all parameters as little-endian float32, and an xxh3 checksum."""
        header = _HEADER.pack(_MAGIC, _VERSION, ENTRIES, NUM_WEIGHT_SETS, NUM_FEATURES, self._buffer[-1])
        kept = np.concatenate([self._buffer[: 2 * ENTRIES], self._buffer[3 * ENTRIES : -1]])
        body = header + kept.astype("<f4").tobytes()
        return body + _CHECKSUM.pack(xxhash.xxh3_64_intdigest(body))

    @classmethod
    def from_bytes(cls, stored: bytes) -> Self:
        """Restore an acceptance model that ``to_bytes`` serialized.

        A correct checksum does not prove the origin of the bytes. Parameters out of the range that learning can reach
        are therefore clipped, so that every restored model can learn again.

        Raises:
            ValueError: If the bytes are damaged or were written by an incompatible version.
        """
        if len(stored) != _SIZE or stored[:8] != _MAGIC:
            raise ValueError(
                f"the stored {len(stored)} bytes are not an acceptance model of this SSD version, which has {_SIZE} "
                "bytes and a fixed header"
            )
        body, (checksum,) = stored[: -_CHECKSUM.size], _CHECKSUM.unpack(stored[-_CHECKSUM.size :])
        if xxhash.xxh3_64_intdigest(body) != checksum:
            raise ValueError("the acceptance model is damaged: its checksum does not match")
        _, version, entries, sets, inputs, num_learned = _HEADER.unpack_from(body)
        if (version, entries, sets, inputs) != (_VERSION, ENTRIES, NUM_WEIGHT_SETS, NUM_FEATURES):
            raise ValueError(f"the acceptance model has version {version}, expected {_VERSION}")
        kept = np.frombuffer(body, "<f4", _NUM_FLOATS, _HEADER.size).astype(np.float64)
        if not np.isfinite(kept).all() or not 0 <= num_learned < 2**53:
            raise ValueError("the acceptance model is damaged: it contains invalid numbers")
        probabilities, counts, weights, knots = clip_to_learnable(
            kept[:ENTRIES], kept[ENTRIES : 2 * ENTRIES], kept[2 * ENTRIES : -_NUM_KNOTS], kept[-_NUM_KNOTS:]
        )
        model = cls()
        log_odds = np.log(probabilities / (1 - probabilities))
        model._buffer[:] = np.concatenate([probabilities, counts, log_odds, weights, knots, [num_learned]])
        return model


PUBLISH_S: Final = 10.0
"""The minimum number of seconds between two published copies of an acceptance model.

Publishing a copy takes 0.1 to 1.5 ms, so 256 busy namespaces spend at most 4 % of the time on it.
"""


class NamespaceModels:
    """The acceptance models of all namespaces. Not thread-safe: only the drafter's thread may use this object."""

    def __init__(self) -> None:
        self._own = self._last_model = AcceptanceModel()
        self._last: LearnedState | None = None
        self._models: WeakKeyDictionary[LearnedState, AcceptanceModel] = WeakKeyDictionary()
        self._published: WeakKeyDictionary[LearnedState, tuple[float, int]] = WeakKeyDictionary()

    def get(self, learned: LearnedState | None) -> AcceptanceModel:
        """Return the acceptance model of a namespace; all requests without a namespace share one model."""
        if learned is None:
            return self._own
        if learned is not self._last:
            model = self._models.get(learned)
            if model is None:
                model = self._models[learned] = AcceptanceModel.load(learned)
                self._published[learned] = time.monotonic(), model.num_learned
            self._last, self._last_model = learned, model
        return self._last_model

    def ended(self, learned: LearnedState | None) -> None:
        """Publish a copy of the acceptance model of an ended request, if the last copy is older than PUBLISH_S."""
        published = None if learned is None else self._published.get(learned)  # None if nothing was drafted for it
        if learned is not None and published is not None and time.monotonic() - published[0] >= PUBLISH_S:
            self._publish(learned)

    def publish(self) -> None:
        """Publish copies of all acceptance models that have learned since their last published copy."""
        for learned in list(self._models):
            self._publish(learned)

    def _publish(self, learned: LearnedState) -> None:
        model, (_, num_published) = self._models[learned], self._published[learned]
        if model.num_learned != num_published:
            learned.publish(model.copy())
            self._published[learned] = time.monotonic(), model.num_learned
