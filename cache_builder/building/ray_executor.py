"""Building on the workers of a Ray cluster, one task per block. A task is restarted if its worker or node is lost.

Only descriptions and results of blocks are sent. The workers read the inputs and write segments in a directory that all
of them can reach.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path

from cache_builder.building.build import Block, BlockResult, BuildOptions, Executor, build_block
from cache_builder.workers import Progress, prepare_worker
from ssd.errors import ConfigError, SSDError

_RETRIES = 5
"""The number of times that a Ray task is restarted after the loss of its worker."""

_BYTES_A_TOKEN = 18
_BYTES_A_WORKER = 512 << 20
"""The memory in bytes that Ray reserves for each task in addition to 18 bytes per token of a segment."""


def ray_executor(address: str | None) -> Executor:
    """Return an executor for `build` that distributes blocks over a Ray cluster. Raises ConfigError if Ray is missing.

    If ``address`` is None, the cluster is ``$RAY_ADDRESS``, or a new cluster on this machine. If no cluster answers,
    the executor raises ConfigError.
    """
    if find_spec("ray") is None:
        raise ConfigError("building on a cluster needs Ray: pip install 'ssd-serving[ray]'")

    def run(blocks: Sequence[Block], options: BuildOptions, progress: Progress) -> Iterator[BlockResult]:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        import ray

        where = address or os.environ.get("RAY_ADDRESS")
        settings = {"address": where} if where else {"include_dashboard": False}
        try:
            ray.init(logging_level=logging.ERROR, log_to_driver=False, **settings)
        except (ConnectionError, ValueError, RuntimeError) as error:
            raise ConfigError(
                f"no Ray cluster answers at {where or 'this machine'} ({str(error).splitlines()[0][:200]}): start one "
                "with `ray start --head`, and give --ray-address HOST:PORT"
            ) from None
        weights = {block.number: block.weight for block in blocks}
        memory = _BYTES_A_WORKER + _BYTES_A_TOKEN * min(options.segment_tokens, max(weights.values(), default=0))
        task = ray.remote(num_cpus=1, memory=memory, max_retries=_RETRIES)(_build)
        try:
            waiting = [task.remote(block, options, str(Path.cwd())) for block in blocks]
            while waiting:
                (done,), waiting = ray.wait(waiting)
                if isinstance(result := ray.get(done), Exception):
                    raise result
                progress(weights[result.number], result.counts.num_tokens)
                yield result
        except ray.exceptions.RayError as error:
            raise SSDError(
                f"the build on Ray failed: {str(error).strip().splitlines()[-1][:300]}. Check that all workers can "
                f"access {options.directory.parent} and have ssd-serving[builder] installed. The same command "
                "resumes the build"
            ) from None
        finally:
            ray.shutdown()

    return run


def _build(block: Block, options: BuildOptions, folder: str) -> BlockResult | Exception:
    """Build a block in a Ray worker. Errors are returned, because Ray would retry a task that raises."""
    prepare_worker()
    os.chdir(folder)  # relative input paths are resolved in the user's directory
    try:
        return build_block(block, options)
    except (SSDError, OSError) as error:
        return error
