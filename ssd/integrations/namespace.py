"""The one namespace that an integration drafts from and learns into, and all that has to be closed with it."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack

import numpy as np
import numpy.typing as npt

from ssd.integrations.settings import IntegrationSettings
from ssd.retrieval.cache import CacheSet, SuffixCache


class OpenNamespace:
    """A namespace as ``ssd-serve`` with the same settings would open it: files, warm-up directories and Redis."""

    def __init__(self, settings: IntegrationSettings, *, fingerprint: str, vocab_size: int) -> None:
        """``fingerprint`` and ``vocab_size`` : the tokenizer's, ``TextCodec`` has both.

        Raises ConfigError and CacheError: what is wrong with the settings is to be heard at the start.
        """
        config = settings.cache_config()
        self._lead_in_tokens = config.index.lead_in_tokens
        with ExitStack() as opening:
            share = None
            if settings.redis_url is not None:
                from ssd.sharing.redis_log import RedisLog  # needs redis-py, which not everybody has installed

                log = RedisLog(settings.redis_url, fingerprint=fingerprint, vocab_size=vocab_size)
                share = opening.enter_context(log).attach
            caches = opening.enter_context(CacheSet(config, fingerprint, namespace=settings.namespace, on_open=share))
            self.cache: SuffixCache = caches.get()
            for directory in settings.warm_dirs:
                self.cache.add_static_directory(directory)
            self._resources = opening.pop_all()

    def learn(self, token_ids: Sequence[int] | npt.NDArray[np.int32], *, prompt_length: int, num_known: int) -> None:
        """Store a completed sequence. Never raises. O(n).

        ``num_known`` : so many of its tokens were stored by an earlier call for the same sequence; the rest is stored
        with a lead-in of the cache's length, so that it can be matched.
        """
        if num_known >= len(token_ids):
            return
        if num_known > 0:
            self.cache.append(token_ids[max(0, num_known - self._lead_in_tokens) :])
        else:
            self.cache.append(token_ids, prompt_length=prompt_length)

    def close(self) -> None:
        """Keep everything and let go of files and connections. May be called twice."""
        self._resources.close()
