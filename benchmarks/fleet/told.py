"""What replicas write to a log that lags, and what they know of it: filters, without the caches."""

from __future__ import annotations

from collections import ChainMap, defaultdict
from collections.abc import Sequence
from typing import Any, cast

from benchmarks.fleet.traffic import Request
from ssd.config import IndexConfig
from ssd.retrieval.packed import Tokens
from ssd.retrieval.prefixes import PrefixFilter, block_hashes, hash_of, split_sequence
from ssd.sharing.entry import LEAD_IN_TOKENS, MAX_ENTRY_TOKENS


class Told:
    """A log that is read after a lag. Times never fall.

    ``guesses_alone`` : each replica has a filter that notes all it is told, as those that serve do; else one filter is
    told for all of them, in the log's order, under each one's own text. Both store the same but where the last tokens
    of two blocks are equal: which of the two a piece goes on from is a guess of the filter, the one it heard of last,
    and a replica hears of its own text before all others.
    """

    def __init__(self, replicas: int, config: IndexConfig, *, guesses_alone: bool = False) -> None:
        self._guesses_alone = guesses_alone
        self._all = _filter(config)
        self._filters = [_filter(config, None if guesses_alone else self._all) for _ in range(replicas)]
        self._num_heard = [0] * replicas
        self._log: list[tuple[float, int, Tokens]] = []
        self._num_told = 0
        self.num_entries = 0
        self.num_tokens = 0
        """Written to the log."""

    def advance(self, until: float) -> list[Tokens]:
        """What all are told of by now and were not before: all that was written ``until`` then, in order."""
        told: list[Tokens] = []
        while self._num_told < len(self._log) and self._log[self._num_told][0] <= until:
            told.append(self._log[self._num_told][2])
            self._num_told += 1
            if not self._guesses_alone:
                self._all.note(told[-1], 0)
        return told

    def learn(self, replica: int, now: float, text: Tokens, prompt_length: int) -> list[Tokens]:
        """What ``replica`` stores of a request that ended, and writes to the log."""
        if self._guesses_alone:
            for _, writer, piece in self._log[self._num_heard[replica] : self._num_told]:
                if writer != replica:
                    self._filters[replica].note(piece, 0)
            self._num_heard[replica] = self._num_told
        pieces = self._filters[replica].pieces(text, prompt_length, 0)
        for piece in pieces:
            for part in split_sequence(piece, MAX_ENTRY_TOKENS, LEAD_IN_TOKENS):
                self._log.append((now, replica, part))
                self.num_entries += 1
                self.num_tokens += len(part)
        return pieces


def guesses(
    requests: Sequence[Request], places: Sequence[int], replicas: int, lag_s: float, config: IndexConfig
) -> dict[str, Any]:
    """What replicas that guess alone write beside those that have one filter for all of them.

    "entries" are of those that guess alone, "differing" the requests of which the others store another piece;
    "unexplained" of those hold no block whose last tokens are also another's, nor begin so: to be 0.
    """
    alone, together = Told(replicas, config, guesses_alone=True), Told(replicas, config)
    blocks, lead_in = config.dedup_block_tokens, config.lead_in_tokens
    differing, continued = list[list[int]](), defaultdict[int, set[int]](set)
    for number in sorted(range(len(requests)), key=lambda number: requests[number].end):
        request, lengths = requests[number], []
        hashes, ends = block_hashes(request.text, 0, 0, blocks, lead_in)
        if len(request.text) > lead_in:  # which may be taken to go on from a block that ends so
            ends.append(hash_of(request.text[:lead_in]))
            hashes.append(0)
        for end, block in zip(ends, hashes, strict=True):
            continued[end].add(block)
        for told in (alone, together):
            told.advance(request.end - lag_s)
            pieces = told.learn(places[number], request.end, request.text, len(request.row.context))
            lengths.append(sum(map(len, pieces)))
        if lengths[0] != lengths[1]:
            differing.append(ends)
    return {
        "entries": alone.num_entries,
        "differing": len(differing),
        "unexplained": sum(all(len(continued[end]) == 1 for end in ends) for ends in differing),
    }


def _filter(config: IndexConfig, told: PrefixFilter | None = None) -> PrefixFilter:
    """``told`` : what is known beside what the filter notes itself."""
    made = PrefixFilter(config.dedup_block_tokens, config.lead_in_tokens, follows_others=True)
    if told is not None:
        made._positions = cast(dict[int, int], ChainMap(made._positions, told._positions))
        made._ends = cast(dict[int, int], ChainMap(made._ends, told._ends))
    return made
