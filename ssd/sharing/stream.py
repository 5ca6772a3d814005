"""One namespace's stream as a replica has read it."""

from __future__ import annotations

import time
import weakref
from collections import OrderedDict, deque
from collections.abc import Iterable

from ssd.retrieval.cache import SuffixCache
from ssd.sharing.bookmark import Bookmark
from ssd.sharing.connection import Backoff
from ssd.sharing.pages import BEGINNING, id_before, order
from ssd.sharing.reception import Reception

PAGE = 64
"""Entries of a page, where none is too large; 1 MB at most."""

_MAX_SEEN = 1 << 16


class Stream:
    """Only the reader's thread changes it.

    ``bookmark`` : what of it is in the cache, over restarts. ``last_id`` : what comes after it is to be read, None
    before the place was found where reading begins. ``entries`` : (id, tokens) of what the log holds, oldest first, to
    keep it within its bounds.
    """

    def __init__(self, key: str, cache: SuffixCache, bookmark: Bookmark) -> None:
        self.key = key
        self.cache = weakref.ref(cache)
        self.bookmark = bookmark
        self.page = PAGE
        """Entries to ask for at once: 1 after one was too large, as the server makes all of the reply at once."""
        self.is_refused = False
        """Whether the server refused the last command for this stream."""
        self.is_cut = False
        """Whether it did not answer, while others may: a node of a cluster."""
        self.compare_at = 0.0
        self.reception = Reception()
        self.held_until = 0.0
        """When it may be read, by ``time.monotonic``: somebody else is giving its cache what came before."""
        self.num_gaps = 0
        """How often reading began where it is not known that nothing was missed."""
        self.is_joined = False
        """Whether what may have been missed was taken from elsewhere just before reading begins."""
        self.entries: deque[tuple[bytes, int]] = deque()
        self.num_tokens = 0
        self._seen: OrderedDict[bytes, None] = OrderedDict()
        self._backoff = Backoff()
        self._rests_until = 0.0
        self.forget()

    def forget(self) -> None:
        """The log is not the one that was read: a place to begin is to be found."""
        self.last_id: bytes | None = None
        self.anchor: bytes | None = None
        """An entry that is in the log as long as it is the one that was read; the newest of them that was fetched."""
        self.search = Search()
        self._known: tuple[int, int] | None = None
        self.entries.clear()
        self.num_tokens = 0

    def begin(self, known_id: bytes | None) -> None:
        """The search has come to its end; entries up to ``known_id`` are in the cache already."""
        self.num_gaps += not (self.bookmark.is_continued or self.is_joined)
        self.is_joined = False
        oldest = self.search.oldest
        self.last_id = BEGINNING if oldest is None or self.search.is_whole else id_before(oldest)
        self.anchor = oldest
        self._known = None if known_id is None else order(known_id)

    def is_known(self, entry_id: bytes) -> bool:
        """Whether the bookmark is past this entry."""
        return self._known is not None and order(entry_id) <= self._known

    def saw(self, entry_id: bytes, num_tokens: int, *, was_fetched: bool) -> None:
        """Entry ``entry_id`` is in the log and has been read, or was too large to be."""
        self.last_id = entry_id
        if was_fetched or self.anchor is None:
            self.anchor = entry_id
        self.entries.append((entry_id, num_tokens))
        self.num_tokens += num_tokens

    def has_seen(self, sequence_id: bytes) -> bool:
        """Whether an entry with this sequence id was read before, among the last 65,536; from now on it was."""
        if sequence_id in self._seen:
            self._seen.move_to_end(sequence_id)
            return True
        self._seen[sequence_id] = None
        if len(self._seen) > _MAX_SEEN:
            self._seen.popitem(last=False)
        return False

    def saw_before(self, sequence_ids: Iterable[bytes]) -> None:
        """Entries with these sequence ids are stored, though they were not read here."""
        for sequence_id in sequence_ids:
            self.has_seen(sequence_id)

    def turn_page(self, *, was_cut: bool) -> None:
        """A page was read. ``was_cut`` : an entry of it was too large."""
        self.page = 1 if was_cut else min(2 * self.page, PAGE)

    def refuse(self, *, is_cut: bool) -> None:
        """The server refused a command, or ``is_cut`` : did not answer. The log may be another one afterwards."""
        self.is_refused, self.is_cut = True, is_cut
        if is_cut:
            self.compare_at = 0.0
        self.rest()

    def rest(self) -> None:
        """Leave it alone for a while, so that the others are served."""
        self._rests_until = time.monotonic() + self._backoff.next_delay_s()

    def wake(self) -> None:
        """All is well with it."""
        self.is_refused = False
        self._backoff.reset()

    @property
    def is_resting(self) -> bool:
        """Whether it is to be left alone."""
        return time.monotonic() < max(self._rests_until, self.held_until)


class Search:
    """Where the newest part of a log begins that is within the bounds, from its end backwards.

    ``oldest`` : id of the oldest entry found so far. ``is_whole`` : the log holds no older one.
    """

    def __init__(self) -> None:
        self.oldest: bytes | None = None
        self.is_whole = False
        self.num_entries = 0
        self.num_tokens = 0

    def found(self, entry_id: bytes, num_tokens: int) -> None:
        """The next older entry."""
        self.oldest = entry_id
        self.num_entries += 1
        self.num_tokens += num_tokens
