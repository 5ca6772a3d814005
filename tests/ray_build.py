"""A build on a Ray cluster of two workers, of which one may be lost in the middle: a program of its own.

``python -m tests.ray_build INPUT TOKENIZER OUT none|worker|node`` prints the ids of the segments as JSON.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
from pathlib import Path
from typing import Any

from cache_builder.building.build import BuildOptions, build
from cache_builder.building.ray_executor import ray_executor
from ssd.retrieval.files import read_manifest

BLOCK_BYTES = 4 << 10


def main(source: str, tokenizer: str, out: str, lost: str) -> None:
    """Start the cluster, build, stop it."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    from ray.cluster_utils import Cluster

    logging.disable(logging.ERROR)
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    try:
        nodes = [cluster.add_node(num_cpus=1, object_store_memory=80 << 20) for _ in range(2)]
        num_tokens = 0

        def progress(_num_bytes: int, more: int) -> None:
            nonlocal num_tokens, lost
            num_tokens += more
            if num_tokens > 10_000 and lost != "none":
                _lose(lost, nodes[0])
                lost = "none"

        options = BuildOptions(namespace="default", tokenizer=tokenizer, block_bytes=BLOCK_BYTES)
        build([source], Path(out), options, progress=progress, executor=ray_executor(cluster.address))
        assert lost == "none", "the build was over before anything was lost"
    finally:
        cluster.shutdown()
    manifest = read_manifest(Path(out))
    assert manifest is not None
    print(json.dumps(manifest.segment_ids))


def _lose(what: str, node: Any) -> None:
    """kill -9 of the workers of a node, or of the node with all its processes."""
    (raylet,) = [info.process.pid for info in node.all_processes["raylet"]]
    workers = [pid for pid, parent, name in _processes() if parent == raylet and name.startswith("ray::")]
    assert workers
    for pid in [*workers, raylet] if what == "node" else workers:
        os.kill(pid, signal.SIGKILL)


def _processes() -> list[tuple[int, int, str]]:
    """(pid, parent, command line) of all."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((path / "stat").read_text().rpartition(")")[2].split()[1])
            found.append((int(path.name), parent, (path / "cmdline").read_text()))
        except OSError:  # it ended meanwhile
            continue
    return found


if __name__ == "__main__":
    main(*sys.argv[1:])
