"""Where a fault happens: a server with a durable cache under a load; and the faults, each a few lines that do it."""

from __future__ import annotations

import http.client
import json
import os
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np
import xxhash

from benchmarks.faults.history import History
from benchmarks.faults.load import Load, Question, notes_on_disk
from benchmarks.processes import Server
from ssd.text.codec import TextCodec

NAMESPACE = "faults"

_CACHE_TOKENS = 1 << 20
_DISK_BYTES = 32 << 20
_SERVER = (
    *("--device", "cpu", "--dtype", "float32", "--max-num-seqs", "4", "--max-model-len", "256"),
    *("--num-speculative-tokens", "16", "--exact", "on"),
)


class SkippedError(Exception):
    """What a fault needs is not to be had here."""


def server(log: Path, *options: str) -> Server:
    """A small one, with the bundled model."""
    return Server(log, *_SERVER, *options)


class Scene:
    """A context manager. Everything starts when it is entered and ends when it is left."""

    def __init__(self, home: Path, codec: TextCodec, questions: Sequence[Question], chance: random.Random) -> None:
        self.directory = home / "cache"
        self.history = History()
        self.chance = chance
        self.is_damaged = False
        """Whether a fault destroyed files: what was in them may be missing."""
        self.is_on_small_disk = False
        self.server: Server
        self.load: Load
        self._home = home
        self._codec = codec
        self._questions = questions
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def open(self, *, with_small_disk: bool) -> None:
        """Start what the faults need. Raises SkippedError."""
        self.directory.mkdir(parents=True)
        if with_small_disk:
            self._mount()
        options = ["--cache-dir", str(self.directory), "--namespace", NAMESPACE]
        options += ["--cache-tokens", str(_CACHE_TOKENS), "--rebuild-interval", "0.3"]
        self.server = server(self._home / "server.log", *options)
        self.load = Load(self.server, self._questions, self.history, NAMESPACE)
        self._stack.callback(self.server.kill)
        self.server.start()

    def kill_server(self) -> None:
        """``kill -9``; what it had not written is lost, and nobody may mind."""
        self.server.kill()
        self.history.end_life(in_order=False)

    def close_server(self, *, kill_after_s: float | None = None) -> None:
        """SIGTERM, and a kill if it takes longer than that."""
        is_closed = self.server.terminate(kill_after_s=kill_after_s)
        self.history.end_life(in_order=is_closed and not self.is_damaged)

    def revive_server(self) -> None:
        """If it ended by itself, start it again."""
        if self.server.revive():
            self.history.end_life(in_order=False)

    def hold(self, seconds: float) -> None:
        """Let it last about so long."""
        time.sleep(seconds * self.chance.uniform(0.7, 1.3))

    def promise_committed(self) -> None:
        """What is on disk now must be there at the end."""
        if not self.is_damaged:
            self.history.promise(number for _, number in self.notes_on_disk())

    def notes_on_disk(self) -> list[tuple[str, int]]:
        """(namespace, number) of each note in the cache directory."""
        return notes_on_disk(self.directory, self._codec, _CACHE_TOKENS)

    def _mount(self) -> None:
        if shutil.which("mount") is None or not _works(
            ["mount", "-t", "tmpfs", "-o", f"size={_DISK_BYTES}", "tmpfs", str(self.directory)]
        ):
            raise SkippedError("a small disk needs the right to mount a tmpfs")
        self.is_on_small_disk = True
        self._stack.callback(_works, ["umount", "--lazy", str(self.directory)])


def _works(command: list[str]) -> bool:
    return subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False).returncode == 0


def server_loading(scene: Scene) -> None:
    """Killed while it loads, then started again."""
    with scene.load.outage():
        scene.promise_committed()
        scene.kill_server()
        scene.server.start(wait=False)
        time.sleep(scene.chance.uniform(0.0, 6.0))
        scene.kill_server()
        scene.server.start()


def server_serving(scene: Scene) -> None:
    """Killed while it serves."""
    with scene.load.outage():
        scene.promise_committed()
        scene.kill_server()
        scene.server.start()


def server_closing(scene: Scene) -> None:
    """Killed while it closes in order."""
    with scene.load.outage():
        scene.promise_committed()
        scene.close_server(kill_after_s=scene.chance.uniform(0.0, 1.0))
        scene.server.start()


def worker(scene: Scene) -> None:
    """The merge worker is killed whenever it is back."""
    for _ in range(5):
        for process_id in scene.server.workers():
            with suppress(ProcessLookupError):
                os.kill(process_id, signal.SIGKILL)
        scene.hold(0.5)


def worker_stopped(scene: Scene) -> None:
    """The merge worker hangs for a while."""
    stopped = scene.server.workers()
    for process_id in stopped:
        os.kill(process_id, signal.SIGSTOP)
    scene.hold(4.0)
    for process_id in stopped:
        with suppress(ProcessLookupError):
            os.kill(process_id, signal.SIGCONT)


_HEADER = 256  # bytes of a segment file
_LEARNED_HEADER = 32


def full(scene: Scene) -> None:
    """No byte left on the disk for a while."""
    filler = scene.directory / "filler"
    with filler.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(1 << 16))
        except OSError:
            pass
        scene.hold(4.0)
    filler.unlink()


def immutable(scene: Scene) -> None:
    """Nothing can be created, renamed or removed in the directory for a while."""
    directory = scene.directory / NAMESPACE
    if os.geteuid() != 0:
        directory.chmod(0o500)
        scene.hold(4.0)
        directory.chmod(0o700)
        return
    if not _chattr("+i", directory):
        raise SkippedError("root writes to every directory, and chattr +i does not work on this file system")
    try:
        scene.hold(4.0)
    finally:
        _chattr("-i", directory)


def segment_truncated(scene: Scene) -> None:
    """Mapped segments lose their second half."""
    for path in _segments(scene):
        os.truncate(path, path.stat().st_size // 2)
    scene.hold(3.0)


def segment_overwritten(scene: Scene) -> None:
    """All but the header of mapped segments is written over with random bytes."""
    for path in _segments(scene):
        with path.open("r+b") as file:
            file.seek(_HEADER)
            file.write(scene.chance.randbytes(path.stat().st_size - _HEADER))
    scene.hold(3.0)


def learned_hostile(scene: Scene) -> None:
    """Between two lives, what was learned is replaced by numbers of the worst kind under a right checksum."""
    with scene.load.outage():
        scene.promise_committed()
        scene.close_server()
        path = scene.directory / NAMESPACE / "learned.bin"
        if path.exists():
            content = path.read_bytes()[:-8]
            num_floats = (len(content) - _LEARNED_HEADER) // 4
            worst = scene.chance.choice([float("nan"), float("inf"), 1e30, -1e30, 0.0, 1e-30])
            content = content[:_LEARNED_HEADER] + np.full(num_floats, worst, "<f4").tobytes()
            path.write_bytes(content + xxhash.xxh3_64_intdigest(content).to_bytes(8, "little"))
        scene.server.start()


def _segments(scene: Scene) -> list[Path]:
    """The segments of the server, once there is one; what they held is not promised any more."""
    deadline = time.monotonic() + 20
    while not (found := list((scene.directory / NAMESPACE).glob("*.seg"))) and time.monotonic() < deadline:
        time.sleep(0.1)
    scene.is_damaged = True
    return found


def _chattr(flag: str, directory: Path) -> bool:
    if shutil.which("chattr") is None:
        return False
    return subprocess.run(["chattr", flag, str(directory)], capture_output=True, check=False).returncode == 0


_PROMPT = {"prompt": "x", "max_tokens": 4}
_PATH = "/v1/completions"

_BODIES: tuple[tuple[str, bytes], ...] = (
    (_PATH, json.dumps({**_PROMPT, "top_k": 1 << 63}).encode()),
    (_PATH, json.dumps({**_PROMPT, "seed": 1 << 80}).encode()),
    (_PATH, json.dumps({**_PROMPT, "max_tokens": 1 << 70}).encode()),
    (_PATH, json.dumps({**_PROMPT, "n": 1 << 40}).encode()),
    (_PATH, json.dumps({**_PROMPT, "temperature": 1e308}).encode()),
    (_PATH, json.dumps({**_PROMPT, "logit_bias": {"9" * 5000: 1}}).encode()),
    (_PATH, json.dumps({**_PROMPT, "logit_bias": {str(token): -1 for token in range(4096)}}).encode()),
    (_PATH, json.dumps({**_PROMPT, "bad_words": ["x" * 50] * 100}).encode()),
    (_PATH, json.dumps({**_PROMPT, "stop": ["a"] * 1000}).encode()),
    (_PATH, json.dumps({**_PROMPT, "allowed_token_ids": list(range(20_000))}).encode()),
    (_PATH, json.dumps({"prompt": [[1]] * 20_000, "n": 8, "max_tokens": 1}).encode()),
    (_PATH, json.dumps({"prompt": [-1, 1 << 70], "max_tokens": 1}).encode()),
    (_PATH, json.dumps({**_PROMPT, **{f"unknown{number}": number for number in range(20_000)}}).encode()),
    (_PATH, b"[" * 100_000),
    (_PATH, b'{"prompt": "\xff\xfe"}'),
    (_PATH, b""),
    ("/tokenize", json.dumps({"prompt": "x " * 500_000}).encode()),
    ("/detokenize", json.dumps({"tokens": list(range(1000)) * 200}).encode()),
    ("/no/such/path", b"{}"),
)


def hostile(scene: Scene) -> None:
    """Each of them in turn; a 5xx or no answer counts as a failed one."""
    for path, body in _BODIES:
        try:
            status, _ = scene.server.ask("POST", path, body)
            outcome = "refused" if status < 500 else "failed"
            reason = str(status)
        except (OSError, http.client.HTTPException) as error:
            outcome, reason = "failed", f"{type(error).__name__}: {error}"
        scene.load.counts[outcome] += 1
        if outcome == "failed":
            scene.load.failures.append(f"{path} {body[:80]!r}: {reason}")
        scene.revive_server()


@dataclass(frozen=True, slots=True)
class Fault:
    """``inject`` returns when the fault is over; the load runs meanwhile.

    ``is_alone`` : never combined with others, as it destroys what they are judged by.
    """

    name: str
    inject: Callable[[Scene], None]
    needs_small_disk: bool = False
    is_alone: bool = False


FAULTS: tuple[Fault, ...] = (
    Fault("server-kill-loading", server_loading),
    Fault("server-kill-serving", server_serving),
    Fault("server-kill-closing", server_closing),
    Fault("worker-kill", worker),
    Fault("worker-stop", worker_stopped),
    Fault("disk-full", full, needs_small_disk=True),
    Fault("disk-immutable", immutable),
    Fault("segment-truncated", segment_truncated, is_alone=True),
    Fault("segment-overwritten", segment_overwritten, is_alone=True),
    Fault("learned-hostile", learned_hostile),
    Fault("requests-hostile", hostile),
)
NAMES = tuple(fault.name for fault in FAULTS)
