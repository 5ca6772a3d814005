"""Faults of processes: ours are killed or stopped."""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress

from benchmarks.faults.scene import Scene


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
