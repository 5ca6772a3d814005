"""The end of requests: their text goes to the cache, once."""

from __future__ import annotations

from collections.abc import Iterable

from ssd.integrations.namespace import OpenNamespace
from ssd.integrations.requests import Request, RequestTable


class Learner:
    """A namespace and the requests on their way into it. Holds all that must be closed, and nothing of the engine."""

    def __init__(self, namespace: OpenNamespace, requests: RequestTable, end_of_text_ids: frozenset[int]) -> None:
        self.namespace = namespace
        self.requests = requests
        self.end_of_text_ids = end_of_text_ids
        self.num_learned = 0
        """Requests that were given to the cache."""

    def learn(self, ended: Iterable[Request]) -> None:
        """Store what is new of each. Never raises. O(text)."""
        for request in ended:
            tokens = request.tokens
            # A draft may run on behind an end of text that the target agreed with; nobody got to see that.
            start = max(request.num_learned, request.length - request.num_new)
            last = tokens[start:].tolist()
            end = next((at + 1 for at, token in enumerate(last) if token in self.end_of_text_ids), len(last))
            self.namespace.learn(
                tokens[: start + end], prompt_length=request.prompt_length, num_known=request.num_learned
            )
            self.num_learned += 1

    def close(self) -> None:
        """Learn what is in flight, keep everything, and let go of files and connections. May be called twice."""
        self.learn(self.requests.end_all())
        self.namespace.close()
