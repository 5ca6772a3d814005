"""What was sealed survives ``kill -9`` and a power failure.

Kills are real: the crash benchmark, with few of them. A power failure is a model: every state that the directory may be
in afterwards, given what had been synced, is made and opened.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks.reliability.crash import PROBLEMS
from ssd.config import CacheConfig, IndexConfig
from ssd.retrieval.cache_manager import CacheManager
from ssd.retrieval.directory import SegmentDirectory
from ssd.retrieval.files import read_manifest

FINGERPRINT = "0123456789abcdef" * 2
ROOT = Path(__file__).resolve().parents[1]


def test_nothing_sealed_is_lost_at_random_moments() -> None:
    # A process of its own: it forks, which a process with other tests' threads must not.
    question = ["-m", "benchmarks.reliability", "--question", "crash", "--json"]
    command = [sys.executable, *question, "--kills", "8", "--seed", "11"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert {name: result[name] for name in PROBLEMS} == dict.fromkeys(PROBLEMS, 0)
    assert result["kills"] == 8
    assert result["checked_sequences"] > 0


class Disk:
    """Watches one directory: which bytes and which names have been synced, and what was done since.

    POSIX promises no more than that: bytes not synced may be lost, and of the renames and removals since the directory
    was last synced any may have reached the disk, in any order.
    """

    def __init__(self, path: Path, patch: pytest.MonkeyPatch) -> None:
        self.before_each: Callable[[], None] = lambda: None
        self.num_directory_syncs = 0
        self._names: dict[str, int] = {}  # name -> file (a descriptor that keeps it readable), as last synced
        self._pending: list[tuple[str, int | None]] = []  # name -> what it means since; None: nothing
        self._files: dict[int, int] = {}  # inode -> descriptor; kept open, so that no inode is used twice
        self._synced: set[int] = set()  # descriptors whose bytes are on disk
        for file in path.iterdir():  # what opening the directory made is on disk
            self._names[file.name] = self._keep(file)
        self._synced.update(self._names.values())
        fsync, replace, unlink = os.fsync, os.replace, os.unlink

        def watched_fsync(descriptor: int) -> None:
            target = Path(f"/proc/self/fd/{descriptor}").readlink()
            if target == path:
                self.before_each()
                fsync(descriptor)
                self.num_directory_syncs += 1
                self._names = self._after(self._pending)
                self._pending = []
            elif target.parent == path:
                self.before_each()
                fsync(descriptor)
                self._synced.add(self._keep(target))

        def watched_replace(source: Any, target: Any) -> None:
            if Path(target).parent == path:
                self.before_each()
                self._pending.append((Path(target).name, self._keep(Path(source))))
            replace(source, target)

        def watched_unlink(target: Any) -> None:
            if Path(target).parent == path:
                self.before_each()
                self._pending.append((Path(target).name, None))
            unlink(target)

        patch.setattr(os, "fsync", watched_fsync)
        patch.setattr(os, "replace", watched_replace)
        patch.setattr(os, "unlink", watched_unlink)

    def close(self) -> None:
        """Let the files go."""
        for file in self._files.values():
            os.close(file)

    def states(self) -> Iterator[dict[str, bytes]]:
        """Contents by name that the directory may have after a power failure now: the telling ones."""
        done, last = self._pending, len(self._pending)
        choices = [done[:i] for i in range(last + 1)] + [[operation] for operation in done]
        choices += [done[:i] + done[i + 1 :] for i in range(last)]
        for choice in choices:
            yield {name: self._content(file) for name, file in self._after(choice).items()}

    def _after(self, operations: Sequence[tuple[str, int | None]]) -> dict[str, int]:
        """Names on disk when these operations reached it too."""
        names: dict[str, int | None] = {**self._names, **dict(operations)}
        return {name: file for name, file in names.items() if file is not None}

    def _keep(self, path: Path) -> int:
        inode = path.stat().st_ino
        if inode not in self._files:
            self._files[inode] = os.open(path, os.O_RDONLY)
        return self._files[inode]

    def _content(self, file: int) -> bytes:
        size = os.fstat(file).st_size
        return os.pread(file, size if file in self._synced else size // 2, 0)


def test_a_power_failure_between_any_two_operations_loses_nothing_committed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    index = IndexConfig(capacity_tokens=512, flush_tokens=16, merge_fanout=2, dedup_block_tokens=0)
    acknowledged = 0  # generation of the last commit that returned
    num_states = 0

    def check() -> None:
        nonlocal num_states
        for state in disk.states():
            num_states += 1
            path = tmp_path / "after" / str(num_states)
            path.mkdir(parents=True)
            for name, content in state.items():
                (path / name).write_bytes(content)
            directory = SegmentDirectory(path, fingerprint=FINGERPRINT, namespace="default")
            segments, failures = directory.load()
            directory.close()
            assert failures == [] and directory.manifest.generation >= acknowledged
            assert len(segments) == len(directory.manifest.segment_ids)

    with CacheManager(CacheConfig(index=index, directory=tmp_path / "cache"), FINGERPRINT, inline=True) as caches:
        path = tmp_path / "cache" / "default"
        with monkeypatch.context() as patch:
            disk = Disk(path, patch)
            disk.before_each = check
            num_commits = 0
            for number in range(40):
                caches.get().append([number % 7] * (5 + number % 40))
                caches.maintain()
                check()
                manifest = read_manifest(path, fingerprint=FINGERPRINT)
                if manifest is not None and manifest.generation > acknowledged:
                    acknowledged = manifest.generation
                    num_commits += 1
        stats = caches.get().stats()
        assert stats.num_failures == 0 and stats.num_merges > 5 and stats.num_evicted_segments > 2
    disk.close()
    assert num_states > 500
    assert disk.num_directory_syncs <= 2 * num_commits  # the names of all new segments, then the manifest's
