"""Faults of one server: processes that end or hang, disks and files that fail, requests that want too much."""

from __future__ import annotations

import http.client
import json
import os
import shutil
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import Final

import numpy as np
import xxhash

from benchmarks.faults.fleet import ALONE, Fault, Fleet, SkippedError, works


def server_loading(fleet: Fleet) -> None:
    """Killed while it loads, then started again."""
    (member,) = fleet.members
    with member.outage():
        fleet.promise(member)
        member.kill()
        member.server.start(wait=False)
        time.sleep(fleet.chance.uniform(0.0, 6.0))
        member.kill()
        member.server.start()


def server_closing(fleet: Fleet) -> None:
    """Killed while it closes in order."""
    (member,) = fleet.members
    with member.outage():
        fleet.promise(member)
        member.close(kill_after_s=fleet.chance.uniform(0.0, 1.0))
        member.server.start()


def worker(fleet: Fleet) -> None:
    """The merge worker is killed whenever it is back."""
    for _ in range(5):
        for process_id in fleet.members[0].server.workers():
            with suppress(ProcessLookupError):
                os.kill(process_id, signal.SIGKILL)
        fleet.hold(0.5)


def worker_stopped(fleet: Fleet) -> None:
    """The merge worker hangs for a while."""
    stopped = fleet.members[0].server.workers()
    for process_id in stopped:
        os.kill(process_id, signal.SIGSTOP)
    fleet.hold(4.0)
    for process_id in stopped:
        with suppress(ProcessLookupError):
            os.kill(process_id, signal.SIGCONT)


_HEADER = 256  # bytes of a segment file
_LEARNED_HEADER = 32


def full(fleet: Fleet) -> None:
    """No byte left on the disk for a while."""
    filler = fleet.members[0].directory / "filler"
    with filler.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(1 << 16))
        except OSError:
            pass
        fleet.hold(4.0)
    filler.unlink()


def immutable(fleet: Fleet) -> None:
    """Nothing can be created, renamed or removed in the directory for a while."""
    directory = fleet.members[0].directory / ALONE
    if os.geteuid() != 0:
        directory.chmod(0o500)
        fleet.hold(4.0)
        directory.chmod(0o700)
        return
    if not _chattr("+i", directory):
        raise SkippedError("root writes to every directory, and chattr +i does not work on this file system")
    try:
        fleet.hold(4.0)
    finally:
        _chattr("-i", directory)


def segment_truncated(fleet: Fleet) -> None:
    """Mapped segments lose their second half."""
    for path in _segments(fleet):
        os.truncate(path, path.stat().st_size // 2)
    fleet.hold(3.0)


def segment_overwritten(fleet: Fleet) -> None:
    """All but the header of mapped segments is written over with random bytes."""
    for path in _segments(fleet):
        with path.open("r+b") as file:
            file.seek(_HEADER)
            file.write(fleet.chance.randbytes(path.stat().st_size - _HEADER))
    fleet.hold(3.0)


def learned_hostile(fleet: Fleet) -> None:
    """Between two lives, what was learned is replaced by numbers of the worst kind under a right checksum."""
    (member,) = fleet.members
    with member.outage():
        fleet.promise(member)
        member.close()
        path = fleet.members[0].directory / ALONE / "learned.bin"
        if path.exists():
            content = path.read_bytes()[:-8]
            num_floats = (len(content) - _LEARNED_HEADER) // 4
            worst = fleet.chance.choice([float("nan"), float("inf"), 1e30, -1e30, 0.0, 1e-30])
            content = content[:_LEARNED_HEADER] + np.full(num_floats, worst, "<f4").tobytes()
            path.write_bytes(content + xxhash.xxh3_64_intdigest(content).to_bytes(8, "little"))
        member.server.start()


def _segments(fleet: Fleet) -> list[Path]:
    """The segments of the server, once there is one; what they held is not promised any more."""
    deadline = time.monotonic() + 20
    while not (found := list((fleet.members[0].directory / ALONE).glob("*.seg"))) and time.monotonic() < deadline:
        time.sleep(0.1)
    fleet.members[0].is_damaged = True
    return found


def _chattr(flag: str, directory: Path) -> bool:
    return shutil.which("chattr") is not None and works(["chattr", flag, str(directory)])


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


def hostile(fleet: Fleet) -> None:
    """Each of them in turn; a 5xx or no answer counts as a failed one."""
    (member,) = fleet.members
    for path, body in _BODIES:
        try:
            status, _ = member.server.ask("POST", path, body)
            outcome = "refused" if status < 500 else "failed"
            reason = str(status)
        except (OSError, http.client.HTTPException) as error:
            outcome, reason = "failed", f"{type(error).__name__}: {error}"
        member.loads[0].counts[outcome] += 1
        if outcome == "failed":
            member.loads[0].failures.append(f"{path} {body[:80]!r}: {reason}")
        member.revive()


FAULTS: Final = (
    Fault("server-kill-loading", server_loading),
    Fault("server-kill-serving", lambda fleet: fleet.kill_server(fleet.members[0])),
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
