"""What of a namespace is in files: written as it is sealed and merged, tried again where the disk refuses."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Final

from ssd.errors import CacheError
from ssd.retrieval.cache_state import Checkpoint, Copy
from ssd.retrieval.directory import SegmentDirectory, read_learned
from ssd.retrieval.segment import Segment

log = logging.getLogger(__name__)

RETRY_S: Final = 30.0
"""What could not be written is tried again this often, beside what is sealed meanwhile."""
SAVE_LEARNED_S: Final = 60.0


class DurableSegments:
    """The files of one namespace. Not thread-safe.

    What cannot be written is searched all the same and tried again. Such an outage begins with the first failure and
    ends when everything is in files again, not with the first write that works: a disk that is nearly full takes small
    files all the time.
    """

    def __init__(
        self, name: str, directory: SegmentDirectory, report_failure: Callable[[str, BaseException], None]
    ) -> None:
        """What the directory holds but its segments is read here, they by ``load``."""
        self._name = name
        self._directory = directory
        self._report_failure = report_failure
        self.next_position = directory.manifest.next_position
        self.kept = Checkpoint.from_json(directory.manifest.shared)
        self.learned: bytes | None = None
        """What drafting learned before."""
        try:
            self.learned = read_learned(directory.path)
        except OSError as error:
            report_failure("what was learned beside the text was not read", error)
        self.num_failures = 0
        """Of writing."""
        self._committed: tuple[tuple[Segment, ...], Checkpoint | None] = (), self.kept
        self._is_outage = False
        self._saved_copy: Copy | None = None
        self._save_learned_at = time.monotonic() + SAVE_LEARNED_S

    def load(self) -> list[Segment]:
        """The segments that are there, not kept here: merged ones are to leave the memory.

        Raises FormatVersion and OSError for what cannot be read for now.
        """
        segments, failures = self._directory.load()
        for failure in failures:
            self._report_failure("a segment was left out", failure)
        self._committed = tuple(segments), self.kept
        return segments

    def has(self, segment: Segment) -> bool:
        """Whether it is in a file."""
        return self._directory.has_file(segment.segment_id)

    def write(self, segment: Segment) -> Segment:
        """The segment as it was read from its new file; itself where it could not be written."""
        try:
            return self._directory.write(segment)
        except (OSError, CacheError) as error:
            self._report_outage("a segment stays in memory", error)
            return segment

    def commit(
        self, segments: tuple[Segment, ...], next_position: int, kept: Checkpoint | None, *, is_whole: bool
    ) -> None:
        """Bring the manifest up to date: it names those of ``segments`` that are in files. O(number of segments).

        ``is_whole`` : no merge waits for room.
        """
        files = tuple(filter(self.has, segments))
        if (files, kept) != self._committed:
            try:
                shared = None if kept is None else kept.to_json()
                self._directory.commit(files, next_position=next_position, shared=shared)
                self._committed = files, kept
            except OSError as error:
                self._report_outage("the manifest was not written", error)
                return
        if is_whole and files == segments and self._is_outage:
            self._is_outage = False
            log.warning("cache namespace=%s: its directory can be written again, nothing is missing", self._name)

    def save_learned(self, newest: Copy | None, *, now: bool = False) -> None:
        """Write the newest copy of what drafting learned, every SAVE_LEARNED_S or ``now``; only where it is new."""
        if not now and time.monotonic() < self._save_learned_at:
            return
        self._save_learned_at = time.monotonic() + SAVE_LEARNED_S
        if newest is None or newest is self._saved_copy:
            return
        try:
            self._directory.write_learned(newest.to_bytes())
            self._saved_copy = newest
        except OSError as error:
            self._report_failure("what was learned beside the text was not written", error)

    def close(self) -> None:
        """Let go of the directory."""
        self._directory.close()

    def _report_outage(self, what: str, error: Exception) -> None:
        self.num_failures += 1
        if not self._is_outage:
            self._is_outage = True
            log.error(
                "cache namespace=%s: %s: %s. Requests are served as before; what is learned from now on is kept in "
                "memory and written once the directory can be written again, which is tried every %.0f s. Until then a "
                "restart loses it. Make room, or mount it writable",
                self._name, what, error, RETRY_S,
            )  # fmt: skip
