"""Directories of caches: others at work in them, and things in them that are no files."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from ssd.config import CacheConfig, IndexConfig
from ssd.errors import ConfigError
from ssd.retrieval.cache import CacheSet
from tests.server.client import ask, post, until_ready
from tests.server.test_process import running
from tests.waiting import PATIENCE_S, wait_until

FINGERPRINT = "0123456789abcdef" * 2
STATE = ("secret", "generations.json", "generations.lock")


def open_files() -> list[str]:
    """Names of what this process has open."""
    names = []
    for descriptor in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # that of the listing itself
            names.append(str(descriptor.readlink()))
    return names


@pytest.mark.parametrize("name", STATE)
def test_a_pipe_in_the_place_of_a_file_keeps_nobody_waiting(name: str, tmp_path: Path) -> None:
    state = tmp_path / "cache" / ".ssd"
    state.mkdir(parents=True)
    os.mkfifo(state / name, 0o600)
    key = {"authorization": "Bearer secret"}
    arguments = ["--device", "cpu", "--max-num-seqs", "2", "--cache-dir", str(tmp_path / "cache"), "--api-key"]
    with running(*arguments, "secret") as (process, port):
        if name == "secret":
            assert process.wait(PATIENCE_S) == 2  # without it nothing that was kept could be found
            return
        until_ready(port, process)
        assert post(port, "/v1/completions", {"prompt": "x", "max_tokens": 2}, headers=key).status == 200
        assert ask(port, "DELETE", "/v1/cache", headers=key).status == 200
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_S) == 0


def test_a_namespace_is_deleted_beside_requests_that_open_it(tmp_path: Path) -> None:
    text = np.arange(1, 200, dtype=np.int32)
    stop = threading.Event()
    failures: list[BaseException] = []

    def ask(caches: CacheSet) -> None:
        while not stop.is_set():
            held = caches.hold("tenant")
            assert held is not None
            held.append(text, prompt_length=10)
            del held

    with CacheSet(CacheConfig(directory=tmp_path), FINGERPRINT) as caches:
        askers = [threading.Thread(target=ask, args=(caches,)) for _ in range(3)]
        for asker in askers:
            asker.start()
        try:
            for _ in range(100):
                try:
                    caches.discard("tenant")
                except Exception as error:
                    failures.append(error)
                time.sleep(0.001)
        finally:
            stop.set()
            for asker in askers:
                asker.join()
        wait_until(lambda: not any(thread.name.startswith("ssd-open") for thread in threading.enumerate()))
        caches.discard("tenant")
        gc.collect()
        assert failures == []
        assert not (tmp_path / "tenant").exists() and caches.names() == ["default"]
        assert not any(str(tmp_path / "tenant") in name for name in open_files())


@pytest.mark.parametrize("interval", [1e300, float("inf"), float("nan"), 0.0, -1.0, 86_401.0])
def test_an_interval_that_no_thread_can_wait_for_is_refused(interval: float) -> None:
    with pytest.raises(ConfigError, match="rebuild_interval_s must be > 0 and at most 86400"):
        IndexConfig(rebuild_interval_s=interval)
