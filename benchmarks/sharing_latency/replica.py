"""A replica without a model: it learns texts at a rate, and looks up those of the others until it finds each.

``python -m benchmarks.sharing_latency.replica URL NUMBER REPLICAS TOKENS_PER_S`` says ``ready``, then takes commands on
its standard input: ``say NAMESPACE`` (from now on its texts go there; ``-``: it says nothing) and ``end``, upon which
it prints how many texts it said, is told how many each replica did, waits for what it has not found yet, and prints
what it saw as JSON. With 0 replicas it looks nothing up. Times are the machine's monotonic clock, which
is the same for all.
"""

from __future__ import annotations

import json
import select
import sys
import time
from typing import Any, Final

from benchmarks.sharing_latency.texts import FINGERPRINT, KEY_TOKENS, LOOKED_UP, MEAN_TOKENS, VOCABULARY, text_of
from ssd.config import CacheConfig, DraftConfig
from ssd.drafting import make_drafter
from ssd.drafting.protocol import DraftRequest
from ssd.retrieval.cache import CacheSet
from ssd.retrieval.suffix_cache import SuffixCache
from ssd.sharing.redis_log import RedisLog

_LOOK_S: Final = 0.002
_LAST_S: Final = 5.0
_DRAFT: Final = 8


class Finder:
    """Drafts what follows the first tokens of a text: what comes out is right only where the text is stored."""

    def __init__(self, cache: SuffixCache) -> None:
        self._cache = cache
        self._drafter = make_drafter("ssd", DraftConfig(num_speculative_tokens=_DRAFT))
        getattr(self._drafter, "warm_up", lambda: None)()
        self._number = 0

    def finds(self, writer: int, number: int) -> bool:
        """Whether the text's next tokens are drafted."""
        text, name = text_of(writer, number), str(self._number)
        self._number += 1
        request = DraftRequest(name, text[:KEY_TOKENS], KEY_TOKENS, self._cache.snapshot(), _DRAFT)
        draft = self._drafter.propose([request])[0].token_ids
        self._drafter.finish(name)
        return len(draft) > 0 and bool((draft == text[KEY_TOKENS : KEY_TOKENS + len(draft)]).all())


def main(url: str, number: int, replicas: int, tokens_per_s: float) -> None:
    """Run until told to end."""
    said: list[int] = []
    found: dict[int, list[int]] = {writer: [] for writer in range(replicas) if writer != number}
    with (
        RedisLog(url, fingerprint=FINGERPRINT, vocab_size=VOCABULARY) as log,
        CacheSet(CacheConfig(), FINGERPRINT, namespace=LOOKED_UP, on_open=log.attach) as caches,
    ):
        finder = Finder(caches.get())
        finder.finds(number, 0)
        print("ready", flush=True)
        into, num_said, due = "-", 0, 0.0
        ends_at: float | None = None
        while ends_at is None or time.monotonic() < ends_at:
            if ends_at is None and select.select([sys.stdin], [], [], _LOOK_S)[0]:
                command, *rest = sys.stdin.readline().split() or ["end"]
                if command == "say":
                    into, due = rest[0], time.monotonic()
                else:
                    into, ends_at = "-", time.monotonic() + _LAST_S
                    print(len(said), flush=True)
                    expected = json.loads(sys.stdin.readline())
            elif ends_at is not None:
                if all(len(times) >= expected[writer] for writer, times in found.items()):
                    break
                time.sleep(_LOOK_S)
            while into != "-" and time.monotonic() >= due:
                text = text_of(number, num_said)
                if into == LOOKED_UP:
                    said.append(time.monotonic_ns())
                caches.get(into).append(text)
                num_said += 1
                due += MEAN_TOKENS / tokens_per_s
            for writer, times in found.items():
                while finder.finds(writer, len(times)):
                    times.append(time.monotonic_ns())
        stats = log.stats()
    seen: dict[str, Any] = {
        "said": said,
        "found": found,
        "received": stats.num_received,
        "invalid": stats.num_invalid,
        "dropped": stats.num_dropped,
        "failures": stats.num_failures,
        "cpu_s": time.process_time(),
    }
    print(json.dumps(seen), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4]))
