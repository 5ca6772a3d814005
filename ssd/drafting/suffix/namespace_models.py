"""The acceptance models that one drafter learns: one a namespace, and when copies of them are published."""

from __future__ import annotations

import time
from typing import Final
from weakref import WeakKeyDictionary

from ssd.drafting.suffix.acceptance_model import AcceptanceModel
from ssd.retrieval.segment_store import LearnedState

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
                self._published[learned] = -PUBLISH_S, model.num_learned
            self._last, self._last_model = learned, model
        return self._last_model

    def ended(self, learned: LearnedState | None) -> None:
        """A request of this namespace has ended: publish what was learned if that is due."""
        if learned is not None and time.monotonic() - self._published[learned][0] >= PUBLISH_S:
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
