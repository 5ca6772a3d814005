"""How many slots fit: within the memory there is, and with a message that says what to lower."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ssd.errors import ModelError
from ssd.model.loading.load_target import open_target
from ssd.model.loading.memory import cgroup_room, fit_slots
from tests.models import tiny_model


def fit(
    num_slots: int, max_length: int | None, limit: int, usable: int, *, extra: int = 0, size: int = 1
) -> list[object]:
    found = fit_slots(
        num_slots=num_slots,
        max_length=max_length,
        limit=limit,
        extra=extra,
        bytes_per_token=size,
        usable_bytes=usable,
    )
    return [found.num_slots, found.max_length, found.shortage is None]


def test_a_length_nobody_asked_for_gets_shorter_before_slots_get_fewer() -> None:
    assert fit(4, None, 8000, 20_000) == [4, 5000, False]
    assert fit(4, None, 8000, 8000) == [3, 2048, False]
    assert fit(4, None, 1000, 2000) == [2, 1000, False]


def test_not_even_one_slot_is_an_error_that_says_what_to_lower() -> None:
    with pytest.raises(ModelError, match="Lower --max-model-len to at most 400"):
        fit(4, 1000, 5000, 500, extra=100)
    with pytest.raises(ModelError, match="Free memory"):
        fit(4, None, 5000, 0)


@given(
    num_slots=st.integers(1, 64),
    max_length=st.none() | st.integers(2, 10_000),
    limit=st.integers(2, 10_000),
    extra=st.integers(0, 65),
    size=st.integers(1, 500),
    usable=st.integers(0, 1 << 30),
)
def test_what_is_granted_never_exceeds_the_share_and_one_more_slot_would(
    num_slots: int, max_length: int | None, limit: int, extra: int, size: int, usable: int
) -> None:
    try:
        slots, length, whole = fit(num_slots, max_length, limit, usable, extra=extra, size=size)
    except ModelError:
        smallest = max_length or min(limit, 2048)
        assert (smallest + extra) * size > usable - size
        return
    assert isinstance(slots, int) and isinstance(length, int)
    needed = (length + extra) * size
    assert 1 <= slots <= num_slots and slots * needed <= usable
    assert length == max_length if max_length else length <= limit
    if whole:
        assert (slots, length) == (num_slots, max_length or limit)
    else:
        assert slots == num_slots or (slots + 1) * needed > usable - size


def group(directory: Path, **files: str) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (directory / name.replace("__", ".")).write_text(content)


def test_the_tightest_control_group_counts_and_cached_files_are_free(tmp_path: Path) -> None:
    membership = tmp_path / "cgroup"
    membership.write_text("0::/outer/inner\n")
    mount = tmp_path / "fs"
    group(mount / "outer", memory__max="1000\n", memory__current="700\n", memory__stat="anon 1\ninactive_file 50\n")
    group(mount / "outer" / "inner", memory__max="max\n", memory__current="600\n")
    assert cgroup_room(mount, membership) == 350
    group(mount / "outer" / "inner", memory__max="800\n", memory__current="600\n")
    assert cgroup_room(mount, membership) == 200


def test_version_1_and_a_path_that_is_not_mounted_here(tmp_path: Path) -> None:
    membership = tmp_path / "cgroup"
    membership.write_text("4:memory:/the/hosts/path\n3:cpuset:/\n0::/\n")
    mount = tmp_path / "fs"
    group(mount / "memory", memory__limit_in_bytes="500", memory__usage_in_bytes="100",
          memory__stat="inactive_file 3\ntotal_inactive_file 20\n")  # fmt: skip
    assert cgroup_room(mount, membership) == 420


def test_no_limit_and_no_control_groups_at_all(tmp_path: Path) -> None:
    membership = tmp_path / "cgroup"
    assert cgroup_room(tmp_path, membership) is None
    membership.write_text("0::/\n")
    group(tmp_path, memory__max="max\n", memory__current="600\n")
    assert cgroup_room(tmp_path, membership) is None


def test_more_slots_than_there_is_memory_for_run_as_fewer(caplog: pytest.LogCaptureFixture) -> None:
    """A thousand million slots of the tiny model; nothing is allocated for those that are not granted."""
    with caplog.at_level("WARNING"):
        target = open_target(
            tiny_model(), num_slots=10**9, max_length=100, max_draft_tokens=3, kv_cache_memory_bytes=1 << 19
        )
    # Two layers, keys and values of two heads of 16 floats: 512 bytes a token, 104 tokens a slot.
    assert target.num_slots == (1 << 19) // (512 * 104)
    assert "lower --max-model-len" in caplog.text


def test_a_budget_that_holds_no_slot_is_refused() -> None:
    with pytest.raises(ModelError, match="not even one fits"):
        open_target(tiny_model(), num_slots=4, max_length=100, kv_cache_memory_bytes=1000)
