"""One build in a process of its own: what it takes, and the memory of it and its workers."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).parents[2]
_INTERVAL_S = 0.02


def build(inputs: Path, out: Path, tokenizer: Path, jobs: int) -> dict[str, Any]:
    """Seconds, processor seconds, and the peak of each process's private memory, the largest first.

    Raises AssertionError with what the command said when it fails.
    """
    command = [
        sys.executable, "-m", "cache_builder", "build", str(inputs), "--tokenizer", str(tokenizer), "--out", str(out),
        "--force", "--quiet", "--jobs", str(jobs),
    ]  # fmt: skip
    before, began = _ended_s(), time.perf_counter()
    process = subprocess.Popen(command, cwd=_ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    watch = _Watch(process.pid)
    said, errors = process.communicate()
    took = time.perf_counter() - began
    watch.stop()
    if process.returncode:
        raise AssertionError(f"the build failed: {errors[-2000:]}")
    manifest = json.loads((out / "manifest.json").read_text())["manifest"]
    sizes = [segment["num_tokens"] for segment in manifest["segments"]]
    return {
        "seconds": round(took, 2),
        "processor_s": round(_ended_s() - before, 2),
        "tokens": sum(sizes),
        "segments": len(sizes),
        "largest_segment": max(sizes),
        "peaks": sorted(watch.peaks.values(), reverse=True),
        "peak_of_all": watch.peak_of_all,
        "said": said.splitlines()[0].partition(": ")[2],
    }


class _Watch:
    """Samples the private memory of a process and its children, all along."""

    def __init__(self, pid: int) -> None:
        self.peaks: dict[int, int] = {}
        self.peak_of_all = 0
        self._pid = pid
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """No more samples."""
        self._is_over.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._is_over.wait(_INTERVAL_S):
            total = 0
            for pid in [self._pid, *_children(self._pid)]:
                size = _private_bytes(pid)
                total += size
                self.peaks[pid] = max(self.peaks.get(pid, 0), size)
            self.peak_of_all = max(self.peak_of_all, total)


def _children(pid: int) -> list[int]:
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def _private_bytes(pid: int) -> int:
    """Anonymous pages; 0 when it is gone."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon:")), 0)


def _ended_s() -> float:
    """Processor time of all children that ended, and of theirs."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
