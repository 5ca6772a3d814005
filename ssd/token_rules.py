"""A request's logit bias, allowed tokens and bad words as arrays. This module does not import torch."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.int64]


class BadWords:
    """Finds the tokens that must not come next because they would complete a forbidden token sequence.

    This is the automaton of Aho and Corasick (1975, "Efficient string matching", sections 2 and 3). Its state is the
    longest suffix of the text that is the beginning of a forbidden sequence. The automaton is built in O(tokens of all
    sequences), reads a token in O(1) amortized, and takes about 200 bytes per token of the sequences.
    """

    START = 0  # the state before a text

    def __init__(self, words: Sequence[Sequence[int]]) -> None:
        self._next: list[dict[int, int]] = [{}]
        self._own_ends: list[set[int]] = [set()]  # last tokens of the sequences whose other tokens are the state
        for *begin, end in words:
            state = self.START
            for token in begin:
                if token not in self._next[state]:
                    self._next[state][token] = len(self._next)
                    self._next.append({})
                    self._own_ends.append(set())
                state = self._next[state][token]
            self._own_ends[state].add(end)
        self._shorter = [self.START] * len(self._next)  # the state of the longest proper suffix
        self._longest = max(map(len, words), default=1) - 1
        waiting = deque(self._next[self.START].values())
        while waiting:
            state = waiting.popleft()
            for token, deeper in self._next[state].items():
                self._shorter[deeper] = self.move(self._shorter[state], token)
                waiting.append(deeper)

    def after(self, text: npt.NDArray[np.int32]) -> int:
        """Return the automaton's state after a text, int32[n]. O(length of the longest forbidden sequence)."""
        state = self.START
        for token in text[max(0, len(text) - self._longest) :].tolist():
            state = self.move(state, token)
        return state

    def move(self, state: int, token: int) -> int:
        while state != self.START and token not in self._next[state]:
            state = self._shorter[state]
        return self._next[state].get(token, self.START)

    def ends(self, state: int) -> set[int]:
        """Return the tokens that would complete a forbidden sequence if they came next.

        O(number of forbidden sequences that the text ends within).
        """
        found = set(self._own_ends[self.START])
        while state != self.START:
            found |= self._own_ends[state]
            state = self._shorter[state]
        return found


class TokenRules:
    """The logit bias, allowed tokens and bad words of a request as arrays.

    Attributes:
        bias_ids: int64[n], distinct token ids.
        bias: float64[n], the number that is added to the logit of each token in ``bias_ids``.
        allowed_ids: int64[m], distinct token ids; None allows all tokens.
        bad_words: The automaton that finds forbidden tokens; None if there are no bad words.
        tensor_cache: The sampler's cache of these arrays as tensors, for each vocabulary size and device.
    """

    __slots__ = ("_greatest_bad", "allowed_ids", "bad_words", "bias", "bias_ids", "tensor_cache")

    def __init__(
        self,
        logit_bias: Sequence[tuple[int, float]],
        allowed_token_ids: Sequence[int] | None,
        bad_words: Sequence[Sequence[int]],
    ) -> None:
        """Build the arrays from the fields of ``SamplingParams``; several biases of one token are summed."""
        ids = np.array([token for token, _ in logit_bias], np.int64)
        self.bias_ids: Ids
        self.bias_ids, at = np.unique(ids, return_inverse=True)
        self.bias = np.bincount(at, weights=[bias for _, bias in logit_bias], minlength=len(self.bias_ids))
        self.allowed_ids = None if allowed_token_ids is None else np.unique(np.array(allowed_token_ids, np.int64))
        self.bad_words = BadWords(bad_words) if bad_words else None
        self._greatest_bad = max((max(word) for word in bad_words), default=-1)
        self.tensor_cache: dict[Any, Any] = {}

    def greatest_ids(self) -> list[tuple[str, tuple[int, ...]]]:
        """Return pairs of a field name and a tuple with the greatest token id of this field.

        The caller compares the ids with the size of the vocabulary. Fields without token ids are left out.
        """
        found = [
            ("logit_bias", int(self.bias_ids[-1]) if len(self.bias_ids) else -1),
            ("allowed_token_ids", -1 if self.allowed_ids is None else int(self.allowed_ids[-1])),
            ("bad_words", self._greatest_bad),
        ]
        return [(name, (greatest,)) for name, greatest in found if greatest >= 0]


NO_RULES = TokenRules((), None, ())
"""The rules of a request without logit bias, allowed tokens and bad words."""
