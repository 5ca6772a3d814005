"""The profile: who waited for whom is read off a trace rightly, and a real step can be profiled."""

from __future__ import annotations

import gzip
import json
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.profile import main
from benchmarks.profile.timeline import Event, group_of, length, own_times, read_events, summary, union


def event(kind: str, name: str, begin: float, end: float, thread: str = "0/0") -> Event:
    return Event(kind, name, begin, end, thread)


def test_a_step_of_two_kernels_is_busy_has_a_gap_and_waits_for_the_host() -> None:
    events = [
        event("user_annotation", "step", 0, 1000),
        event("user_annotation", "forward", 0, 150),
        event("kernel", "_attend_split", 100, 300, "7/7"),
        event("kernel", "nvjet_gemm", 305, 800, "7/7"),
        event("cuda_runtime", "cudaEventSynchronize", 150, 800),
    ]
    found = summary(events)
    assert found["step_ms"] == 1.0 and found["phases_ms"]["forward"] == 0.15
    assert found["device_busy_ms"] == 0.695 and found["launch_gaps_ms"] == 0.005
    assert found["waits_for_host_ms"] == 0.3  # before the first kernel and after the last
    assert found["host_waits_ms"] == 0.65
    assert found["groups_ms"] == {"matrix products": 0.495, "attention": 0.2}


def test_operators_count_without_those_they_call_and_the_rest_is_outside() -> None:
    events = [
        event("user_annotation", "step", 0, 100),
        event("cpu_op", "aten::linear", 10, 60),
        event("cpu_op", "aten::addmm", 20, 50),
        event("cpu_op", "aten::copy_", 50, 55),
        event("cpu_op", "aten::argmax", 70, 80),
    ]
    assert sorted(own_times(events[1:])) == [
        ("aten::addmm", 30), ("aten::argmax", 10), ("aten::copy_", 5), ("aten::linear", 15),
    ]  # fmt: skip
    found = summary(events)
    assert found["operators_ms"] == 0.06 and found["outside_operators_ms"] == 0.04


def test_a_trace_without_a_step_is_refused() -> None:
    with pytest.raises(ValueError, match="no 'step'"):
        summary([])


@settings(max_examples=60)
@given(st.lists(st.tuples(st.integers(0, 60), st.integers(0, 60)).map(lambda pair: (min(pair), max(pair)))))
def test_the_union_of_intervals_covers_what_they_cover(intervals: list[tuple[int, int]]) -> None:
    covered = {tick for begin, end in intervals for tick in range(begin, end)}
    found = union((float(begin), float(end)) for begin, end in intervals)
    assert length(found) == len(covered)
    assert all(before[1] < after[0] for before, after in pairwise(found))


@pytest.mark.parametrize(
    ("name", "group"),
    [
        ("_attend_split_0d1d", "attention"),
        ("nvjet_tst_64x8_64x16_2x1_v_bz_TNN", "matrix products"),
        ("void at::native::reduce_kernel<ArgMaxOps>", "choice of tokens"),
        ("Memcpy DtoH (Device -> Pageable)", "copies"),
        ("void at::native::vectorized_elementwise_kernel<4>", "norms, rotations, sums"),
        ("something", "others"),
    ],
)
def test_kernels_are_grouped_by_what_they_do(name: str, group: str) -> None:
    assert group_of(name) == group


@pytest.mark.slow
def test_a_plain_and_a_verify_step_are_profiled_and_their_traces_kept(tmp_path: Path) -> None:
    sizes = ["--batch", "2", "--draft", "0", "3", "--context", "48", "--rounds", "2", "--profiled", "2"]
    assert (
        main(
            [
                "--shape",
                "tiny",
                "--device",
                "cpu",
                *sizes,
                "--traces",
                str(tmp_path),
                "--out",
                str(tmp_path / "profile.json"),
            ]
        )
        == 0
    )
    rows = json.loads((tmp_path / "profile.json").read_text())["rows"]
    assert [row["T"] for row in rows] == [1, 4]
    for row in rows:
        trace = json.loads(gzip.decompress((tmp_path / f"trace-b2-t{row['T']}.json.gz").read_bytes()))
        assert read_events(trace) and row["phases_ms"]["forward"] > 0
        assert row["operators_ms"] + row["outside_operators_ms"] == pytest.approx(row["step_ms"], rel=0.01)
