from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from ssd.errors import CacheError, StoreUnavailable
from ssd.retrieval.merge_worker import MergeJob, MergeWorker
from ssd.retrieval.segment import SEPARATOR
from ssd.retrieval.segment_file import open_segment, write_segment
from ssd.retrieval.suffix_array import build_segment
from tests.reference.retrieval import naive_order
from tests.waiting import PATIENCE_S, wait_until

FINGERPRINT = "0123456789abcdef" * 2


def _job(directory: Path, num_inputs: int = 2, num_tokens: int = 50) -> MergeJob:
    random = np.random.default_rng(0)
    inputs = []
    for i in range(num_inputs):
        tokens = random.integers(0, 4, num_tokens).astype(np.int32)
        tokens[-1] = SEPARATOR
        segment = build_segment(tokens, start=i * num_tokens, segment_id=f"in-{i}")
        inputs.append(directory / f"in-{i}.seg")
        write_segment(inputs[-1], segment, fingerprint=FINGERPRINT, namespace="default", durable=False)
    return MergeJob(
        inputs=tuple(map(str, inputs)),
        output=str(directory / "out.seg"),
        segment_id="out",
        start=0,
        fingerprint=FINGERPRINT,
        namespace="default",
        num_tokens=num_inputs * num_tokens,
        durable=False,
    )


def _is_gone(process_id: int) -> bool:
    """True for a zombie too: it runs no more."""
    try:
        state = Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return True
    return state == "Z"


def test_a_job_survives_its_line() -> None:
    job = _job_of_names()
    assert MergeJob.from_json(job.to_json()) == job


def _job_of_names() -> MergeJob:
    return MergeJob(
        inputs=("a b", 'c"\n'),
        output="d",
        segment_id="e",
        start=1,
        fingerprint="f",
        namespace="g",
        num_tokens=2,
        durable=True,
    )


def test_the_process_merges_reports_errors_and_survives_kill_9(tmp_path: Path) -> None:
    worker = MergeWorker()
    try:
        job = _job(tmp_path)
        worker.submit(job).result(timeout=PATIENCE_S)
        merged = open_segment(tmp_path / "out.seg", fingerprint=FINGERPRINT)
        assert merged.order.tolist() == naive_order(merged.tokens.tolist())
        assert len(merged) == 100 and merged.start == 0

        (tmp_path / "in-1.seg").write_bytes(b"damaged")
        with pytest.raises(CacheError, match=r"SegmentCorrupt"):
            worker.submit(job).result(timeout=PATIENCE_S)

        job = _job(tmp_path, num_inputs=3)
        first = worker.process_id
        assert first is not None
        os.kill(first, signal.SIGKILL)
        worker.submit(job).result(timeout=PATIENCE_S)
        assert len(open_segment(tmp_path / "out.seg", fingerprint=FINGERPRINT)) == 150
        assert worker.num_restarts == 1 and worker.process_id not in (None, first)
        last = worker.process_id
    finally:
        worker.close()
    assert worker.process_id is None and last is not None and _is_gone(last)
    with pytest.raises(StoreUnavailable):
        worker.submit(job).result(timeout=1)


def test_a_worker_that_never_ran_can_be_closed() -> None:
    MergeWorker().close()


_PARENT = """
import sys, time
from pathlib import Path
from ssd.retrieval.merge_worker import MergeWorker
worker = MergeWorker(Path(sys.argv[1]))
worker.start().result()
print(worker.process_id, flush=True)
time.sleep(600)
"""


def test_a_killed_parent_leaves_neither_process_nor_scratch_directory(tmp_path: Path) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    (scratch / "a.seg").write_bytes(b"text")
    root = Path(__file__).resolve().parents[1]
    with subprocess.Popen(
        [sys.executable, "-c", _PARENT, str(scratch)], stdout=subprocess.PIPE, text=True, cwd=root
    ) as parent:
        assert parent.stdout is not None
        worker_id = int(parent.stdout.readline())
        assert not _is_gone(worker_id)
        parent.kill()
    wait_until(lambda: _is_gone(worker_id) and not scratch.exists())


def test_the_process_loads_neither_torch_nor_numba() -> None:
    code = "import sys, ssd.retrieval.merge_worker; print(*{'torch', 'numba', 'transformers'} & set(sys.modules))"
    root = Path(__file__).resolve().parents[1]
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=root)
    assert done.stdout.split() == []
