"""Which requests draw with noise that they share, and which noise that is."""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Callable

from ssd.drafting.noise_keys import request_key
from ssd.drafting.sequence_noise import SequenceNoise
from ssd.engine.request import Request


class Coupling:
    """The noise of an engine's requests: of their seeds, or of ``num_streams`` streams that they share.

    Streams are those of a namespace: what a request says depends on the secret of its namespace, on its stream and on
    its own text, and on nothing that another request said. Safe from any thread.
    """

    def __init__(self, num_streams: int, window: int, root: Callable[[], bytes] | None = None) -> None:
        """``root`` : what the secrets of all namespaces are made of, asked at each request; None: drawn at random."""
        self.num_streams = num_streams
        self._window = window
        drawn = secrets.token_bytes(32)
        self._root = root or (lambda: drawn)

    def noise_of(self, request: Request, seed: int) -> SequenceNoise:
        """What a request is sampled with. ``seed`` : drawn for it; its stream, too, where it names none."""
        sampling = request.sampling
        if sampling.seed is not None:
            return SequenceNoise.seeded(sampling.seed, request.choice_index)
        if not self.num_streams or sampling.greedy or not sampling.coupled or request.namespace is None:
            return SequenceNoise.seeded(seed, request.choice_index)
        stream = request.noise_stream
        if stream is None:
            stream = request_key(seed, request.choice_index) % self.num_streams
        return SequenceNoise.coupled(secret_of(self._root(), request.namespace), stream, self._window)


def secret_of(root: bytes, namespace: str) -> int:
    """The secret of a namespace: 64 bits that say nothing of the root or of another's (HMAC, RFC 2104)."""
    return int.from_bytes(hmac.digest(root, b"noise of " + namespace.encode(), hashlib.sha256)[:8], "little")
