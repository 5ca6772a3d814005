"""Programs that learn requests and decode them with drafts: what all have in common, and each peer in its process."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, Protocol, Self

from benchmarks.drafters import Replayer, Setting
from benchmarks.peers import Peer
from benchmarks.replay.settings import PEERS, PeerSetting
from benchmarks.walk import Steps
from cache_builder.evaluation.log import Row


class Contender(Replayer, AbstractContextManager["Contender"], Protocol):
    """Several settings over one memory of requests, and what they are."""

    @property
    def settings(self) -> Sequence[Setting]:
        """In the order of what ``replay`` returns."""
        ...

    def describe(self) -> dict[str, Any]:
        """Its configuration, as it stands in the JSON."""
        ...


class PeerDrafter:
    """Somebody else's drafter, in its own process and environment."""

    def __init__(self, settings: Sequence[Setting], **options: int | str) -> None:
        """``options`` : the peer's own, see `Peer`. Raises PeerUnavailable where it is not installed."""
        self.settings = settings
        self._peer = Peer(PEERS[settings[0].drafter], **options)
        self._options = options
        self._asked = [(setting.limit, _knobs(setting)) for setting in settings]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._peer.close()

    def replay(self, request_id: str, row: Row) -> list[Steps]:
        return self._peer.replay(request_id, row.text(), len(row.context), self._asked)

    def learn(self, request_id: str, row: Row) -> None:
        if self._peer.has_store:
            asked = [] if self._peer.shares_state else self._asked
            self._peer.replay(request_id, row.text(), len(row.context), asked)

    def num_cached_tokens(self) -> int:
        return 0

    def describe(self) -> dict[str, Any]:
        return {"versions": self._peer.versions, **self._options}


def _knobs(setting: Setting) -> dict[str, float | str]:
    return setting.knobs if isinstance(setting, PeerSetting) else {}
