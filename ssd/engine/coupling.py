"""Which requests draw with noise that they share, and which noise that is."""

from __future__ import annotations

import hashlib
import hmac
import random
import secrets
from collections.abc import Callable

import numpy as np

from ssd.drafting.noise import SequenceNoise, request_key
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

    def warm_up(self) -> None:
        """Compile what asks for noise in a pass, and what only coupled requests run, where there can be any."""
        SequenceNoise.seeded_keys([SequenceNoise.seeded(0)], [1], 1)
        if self.num_streams:
            SequenceNoise.coupled(0, 0, self._window).advance(np.zeros(2, np.int32))

    def different_streams(self, count: int, seed: int) -> list[int]:
        """Streams for ``count`` outputs of one prompt, no two the same; all of the engine's where there are as many.

        ``seed`` : what they are drawn with. O(count).
        """
        return random.Random(seed).sample(range(max(self.num_streams, count)), count)

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
        secret, prompt_length = secret_of(self._root(), request.namespace), len(request.prompt_token_ids)
        return SequenceNoise.coupled(secret, stream, self._window, prompt_length=prompt_length)


def secret_of(root: bytes, namespace: str) -> int:
    """The secret of a namespace: 64 bits that say nothing of the root or of another's (HMAC, RFC 2104)."""
    return int.from_bytes(hmac.digest(root, b"noise of " + namespace.encode(), hashlib.sha256)[:8], "little")
