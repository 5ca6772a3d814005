"""What processes and threads take: memory that is really there, and processor time."""

from __future__ import annotations

import ctypes
import gc
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

from ssd.retrieval.snapshot import Snapshot

_TICKS = os.sysconf("SC_CLK_TCK")
_REBUILD_PROCESS = b"ssd.retrieval.merge_worker"
_INTERVAL_S = 0.01
_SAMPLING_SHARE = 0.1  # of one core: the kernel walks all pages for every sample


def trim() -> None:
    """Give freed memory back to the kernel, so that what is resident is in use. Peers' figures are taken so too."""
    gc.collect()
    release = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's; other C libraries give pages back themselves
    if release is not None:
        release(0)


def resident_bytes(process: int | str = "self") -> int:
    """Proportional resident size: anonymous pages, and mapped ones divided by the processes that share them.

    0 when the process is gone.
    """
    try:
        lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith("Pss:")), 0)


def rebuild_process() -> int | None:
    """The process that merges segments, if this one has started it and it runs."""
    for task in Path("/proc/self/task").iterdir():
        try:
            for child in (task / "children").read_text().split():
                if _REBUILD_PROCESS in Path(f"/proc/{child}/cmdline").read_bytes():
                    return int(child)
        except OSError:  # a thread or a process that has just ended
            continue
    return None


def is_working(process: int) -> bool:
    """Whether a process runs, is ready to run, or waits for a disk: all but sleeping for its next job."""
    fields = _stat(Path(f"/proc/{process}/stat"))
    return bool(fields) and fields[0] in "RD"


def processor_s(process: int | str, thread: int | None = None) -> float:
    """Processor time used so far by a process, or by one of its threads; 0.0 when it is gone."""
    path = Path(f"/proc/{process}/stat") if thread is None else Path(f"/proc/{process}/task/{thread}/stat")
    fields = _stat(path)
    return (int(fields[11]) + int(fields[12])) / _TICKS if fields else 0.0


def _stat(path: Path) -> list[str]:
    """Fields of a stat file from the state on; none when it is gone."""
    try:
        return path.read_text().rpartition(")")[2].split()
    except OSError:
        return []


def upkeep_threads() -> list[int]:
    """Native ids of the cache's own threads in this process."""
    return [t.native_id for t in threading.enumerate() if t.name.startswith("ssd-") and t.native_id is not None]


class Growth:
    """How much more this process and the rebuild process hold than before anything was stored."""

    def __init__(self, rebuild_idle_bytes: int, snapshot: Callable[[], Snapshot], floor: int) -> None:
        """Growth counts from now on.

        ``rebuild_idle_bytes`` : what the rebuild process holds when it has nothing to do. ``snapshot`` : what is stored
        at the moment; ``floor`` : a peak counts once so many tokens are, or a nearly empty cache would decide it.
        """
        self._snapshot = snapshot
        self._floor = floor
        self._rebuild_base = rebuild_idle_bytes
        trim()
        self._own_base = resident_bytes()
        self.peak_bytes_per_token = 0.0
        """Largest growth of both processes over the tokens stored at that moment."""
        self.peak_of_rebuild = 0
        """Largest growth of the rebuild process, bytes."""
        self.largest_segment = 1
        """Of the ring, at any time since ``start``; tokens."""
        self.num_samples = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="growth", daemon=True)

    def now(self) -> int:
        """Growth of both processes, bytes."""
        return resident_bytes() - self._own_base + self._of_rebuild()

    def start(self) -> None:
        """Sample every ten milliseconds, or less often where that would take much of a core."""
        self._thread.start()

    def stop(self) -> None:
        """No more samples."""
        self._stop.set()
        self._thread.join()

    def _of_rebuild(self) -> int:
        process = rebuild_process()
        return 0 if process is None else max(0, resident_bytes(process) - self._rebuild_base)

    def _run(self) -> None:
        while not self._stop.is_set():
            began = time.perf_counter()
            of_rebuild = self._of_rebuild()
            growth = resident_bytes() - self._own_base + of_rebuild
            snapshot = self._snapshot()
            num_tokens = snapshot.num_tokens
            sizes = [len(segment) for segment in snapshot.segments if segment.start is not None]
            self.largest_segment = max(self.largest_segment, *sizes, 1)
            self.num_samples += 1
            self.peak_of_rebuild = max(self.peak_of_rebuild, of_rebuild)
            if num_tokens >= self._floor:
                self.peak_bytes_per_token = max(self.peak_bytes_per_token, growth / num_tokens)
            took = time.perf_counter() - began
            self._stop.wait(max(_INTERVAL_S, took / _SAMPLING_SHARE))
