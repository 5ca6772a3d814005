"""Blocks built by the workers of a Ray cluster: Ray Data hands them out, and again where a worker or a node is lost.

What travels is descriptions of blocks and of what became of them; text and segments are read and written by the
workers, in a directory that all of them reach.
"""

from __future__ import annotations

import logging
import os
import pickle
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from cache_builder.building.block import Block, BlockOptions, BlockResult, build_block
from cache_builder.building.build import Executor
from cache_builder.workers import Progress, prepare
from ssd.errors import ConfigError, SSDError

_RETRIES = 5
"""How often a block is begun again whose worker was lost. What it had finished is not done again."""

_BYTES_A_TOKEN = 18
_BYTES_A_WORKER = 512 << 20
"""Of memory that Ray is asked to keep free: for the tokens of a segment while it is sorted, and for all else."""


def ray_executor(address: str | None) -> Executor:
    """An executor on the cluster at ``address``; None: what ``$RAY_ADDRESS`` names, else one made on this machine.

    Raises ConfigError where Ray is not installed, and when it is run where the cluster does not answer.
    """
    if find_spec("ray") is None:
        raise ConfigError("building on a cluster needs Ray: pip install 'ssd-serving[ray]'")

    def run(blocks: Sequence[Block], options: BlockOptions, progress: Progress) -> Iterator[BlockResult]:
        ray = _ray()
        with _connected(ray, address):
            yield from _built(ray, blocks, options, progress)

    return run


def _built(ray: Any, blocks: Sequence[Block], options: BlockOptions, progress: Progress) -> Iterator[BlockResult]:
    weights = {block.number: block.weight for block in blocks}
    most_tokens = min(options.build.segment_tokens, max(weights.values(), default=0))
    dataset = ray.data.from_items([{"block": pickle.dumps(block)} for block in blocks], override_num_blocks=len(blocks))
    dataset = dataset.map(
        _build,
        fn_kwargs={"options": pickle.dumps(options), "folder": str(Path.cwd())},
        num_cpus=1,
        memory=_BYTES_A_WORKER + _BYTES_A_TOKEN * most_tokens,
        ray_remote_args_fn=lambda: {"max_retries": _RETRIES},
    )
    try:
        for row in dataset.iter_rows():
            result = pickle.loads(row["result"])
            if isinstance(result, Exception):
                raise result
            progress(weights[result.number], result.counts.num_tokens)
            yield result
    except ray.exceptions.RayError as error:
        raise SSDError(
            f"the Ray cluster gave up: {str(error).strip().splitlines()[-1][:300]}. Do all workers reach "
            f"{options.directory.parent}, and have they ssd-serving[builder]? The same command goes on with what is "
            "finished"
        ) from None


def _build(row: dict[str, Any], options: bytes, folder: str) -> dict[str, Any]:
    """One block, in a worker of Ray. What is wrong with an input is a result: it is not tried again."""
    prepare()
    os.chdir(folder)  # inputs are named as the user named them
    try:
        result: BlockResult | Exception = build_block(pickle.loads(row["block"]), pickle.loads(options))
    except (SSDError, OSError) as error:
        result = error
    return {"result": pickle.dumps(result)}


@contextmanager
def _connected(ray: Any, address: str | None) -> Iterator[None]:
    """A connection that ends with the build, but for one that was there before."""
    if ray.is_initialized():
        yield
        return
    where = address or os.environ.get("RAY_ADDRESS")
    settings = {"address": where} if where else {"include_dashboard": False}
    try:
        ray.init(logging_level=logging.ERROR, log_to_driver=False, **settings)
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise ConfigError(
            f"no Ray cluster answers at {where or 'this machine'} ({str(error).splitlines()[0][:200]}): start one with "
            "`ray start --head`, and give --ray-address HOST:PORT"
        ) from None
    try:
        yield
    finally:
        ray.shutdown()


def _ray() -> Any:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    import ray
    import ray.data
    import ray.exceptions

    logging.getLogger("ray.data").setLevel(logging.ERROR)
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    context.print_on_execution_start = False
    return ray
