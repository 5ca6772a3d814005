"""What all tests share: seeded property tests, passes of fixed length, and options that say what a run leaves out."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from tests.imports import loaded_by

# Seeded: a failure seen once is seen again.
settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.load_profile("repeatable")

# Read when triton is imported, whichever test comes first: without a GPU its kernels are interpreted.
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")

_NOT_QUICK = {"fastapi", "openai", "tests.redis_server", "torch", "transformers"}


def pytest_addoption(parser: pytest.Parser) -> None:
    """``--slow`` and ``--quick``; without either, all tests but those marked slow run."""
    parser.addoption("--slow", action="store_true", help="run the tests marked slow too")
    parser.addoption("--quick", action="store_true", help="only files of tests that load no model, server or Redis")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave a file out of a quick run by what it imports."""
    is_test = collection_path.name.startswith("test_") and collection_path.suffix == ".py"
    return bool(_NOT_QUICK & loaded_by(collection_path)) or None if is_test and config.getoption("--quick") else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip what is marked slow, so that the end of a run says how many there were."""
    if not config.getoption("--slow"):
        for item in items:
            if "slow" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="slow: `make test ALL=1` and .ci/run run it"))


@pytest.fixture(scope="session", autouse=True)
def times_are_fixed() -> Iterator[None]:
    """Engines in this process are told times that depend on no clock, see `tests.fixed_times`."""
    with pytest.MonkeyPatch.context() as patch:
        if "ssd.engine.proposals" in sys.modules:  # tests that open an engine were imported; others need no torch
            from tests.fixed_times import fix_times

            fix_times(patch)
        yield
