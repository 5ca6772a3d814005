"""One recorded request, decoded in the peer's process under several settings at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks.peers.frames import TokenIds
from benchmarks.peers.local import LocalPeer, Setting
from benchmarks.walk import Proposal, Steps, walk


def replay(
    peers: Sequence[LocalPeer],
    request_id: str,
    text: TokenIds,
    prompt_length: int,
    settings: Sequence[dict[str, Any]],
) -> list[Steps]:
    """Start the request, draft for all of its output under each of ``settings``, stop it and keep what it put out.

    Each setting is {"max_tokens": ..., "setting": {...}}. ``peers`` : of each setting, the same one where settings
    share a state, because what is drafted depends on the text alone and not on earlier drafts. With no setting the one
    peer learns the request.
    """
    distinct = {id(peer): peer for peer in peers}
    requests = {key: _Request(peer, request_id, text, prompt_length) for key, peer in distinct.items()}
    askers = [_Asker(requests[id(peer)], **each) for peer, each in zip(peers, settings, strict=False)]
    steps = walk(text.tolist(), prompt_length, askers)
    for request in requests.values():
        request.advance(len(text))
        request.peer.stop(request_id, keep=True)
    return steps


class _Request:
    """A running request and how much of its text the peer was told."""

    def __init__(self, peer: LocalPeer, request_id: str, text: TokenIds, prompt_length: int) -> None:
        self.peer, self.request_id, self.text = peer, request_id, text
        self._known = prompt_length
        peer.start(request_id, text[:prompt_length])

    def advance(self, position: int) -> None:
        """Tell the peer the text up to ``position``."""
        if position > self._known:
            self.peer.add(self.request_id, self.text[self._known : position])
            self._known = position


class _Asker:
    """One setting."""

    def __init__(self, request: _Request, max_tokens: int, setting: Setting) -> None:
        self._request, self._max_tokens, self._setting = request, max_tokens, setting

    def ask(self, position: int) -> Proposal:
        request = self._request
        request.advance(position)
        draft = request.peer.speculate(request.request_id, request.text[:position], self._max_tokens, self._setting)
        estimates = None if draft.probs is None else conditional(draft.probs, draft.parents)
        return Proposal(draft.ns, draft.token_ids, draft.parents, estimates)

    def tell(self, num_accepted: int) -> None:
        """The text says it all."""


def conditional(probs: Sequence[float], parents: Sequence[int]) -> list[float]:
    """Chance of each token once those before it in its branch were accepted, from the chance of all of them."""
    return [prob if parent < 0 else prob / probs[parent] for prob, parent in zip(probs, parents, strict=True)]
