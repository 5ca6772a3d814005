"""What all tests share: seeded property tests, passes of fixed length, and options that say what a run leaves out."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

from tests.imports import loaded_by

if TYPE_CHECKING:
    from ssd.text.codec import TextCodec

# Seeded: a failure seen once is seen again.
settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.load_profile("repeatable")

# Read when triton is imported, whichever test comes first: without a GPU its kernels are interpreted.
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")

_PROMISES = {
    "the output is the model's, to the bit": [
        "test_lossless",
        "test_exact",
        "server/test_exact_answers",
    ],
    "every fast part does what its slow twin does": [
        "test_drafting",
        "test_drafts",
        "test_search",
        "test_token_recycling",
        "test_static",
        "test_tree",
        "test_rows",
        "test_sampling",
        "test_pass_noise",
        "test_sample_cache",
        "test_acceptance",
        "test_top_tokens",
        "test_cost_model",
        "test_segment_file",
        "test_scheduler",
        "test_text",
    ],
    "the cache cannot hurt": [
        "test_crash",
        "test_directory_recovery",
        "test_recovery",
        "test_outage",
        "test_segment_file",
        "test_prefix_reuse",
        "test_isolation",
        "test_sharing",
    ],
    "a request harms nobody else": [
        "hostile/test_attacks",
        "hostile/test_bodies",
        "hostile/test_fairness",
        "hostile/test_openapi",
        "hostile/test_sites",
        "server/test_limits",
        "test_namespaces",
    ],
    "clients stay as they are": [
        "server/test_apis",
        "server/test_endpoints",
        "server/test_messages_api",
        "server/test_responses",
        "server/test_tools",
        "server/test_call_grammars",
        "server/test_web_ui_in_chromium",
        "test_schema_answers",
        "server/test_parse_helpers",
    ],
    "pages and layers are as described": ["test_architecture", "test_pages", "test_llm"],
}
"""What `make test` runs without ALL=1, by what it is a test of."""

_NOT_QUICK = {"fastapi", "openai", "tests.redis_server", "torch", "transformers"}


def pytest_addoption(parser: pytest.Parser) -> None:
    """``--slow``, ``--quick`` and ``--promises``; without any, all tests but those marked slow run."""
    parser.addoption("--slow", action="store_true", help="run the tests marked slow too")
    parser.addoption("--promises", action="store_true", help="only the files that say what the project promises")
    parser.addoption("--quick", action="store_true", help="only files of tests that load no model, server or Redis")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave a file out of a quick run by what it imports, and of one of promises by its name."""
    if not collection_path.name.startswith("test_") or collection_path.suffix != ".py":
        return None
    if config.getoption("--promises"):
        name = collection_path.relative_to(Path(__file__).parent).with_suffix("").as_posix()
        return None if any(name in names for names in _PROMISES.values()) else True
    return bool(_NOT_QUICK & loaded_by(collection_path)) or None if config.getoption("--quick") else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip what is marked slow, so that the end of a run says how many there were."""
    if not config.getoption("--slow"):
        for item in items:
            if "slow" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="slow: `make test ALL=1` and .ci/run run it"))


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model directory of a tokenizer alone, which nobody changes."""
    from tests.tokenizers_for_tests import write_model_directory

    return write_model_directory(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def codec(model: Path) -> TextCodec:
    """Of that tokenizer."""
    from ssd.text.codec import TextCodec

    return TextCodec.load(str(model))


@pytest.fixture(scope="session", autouse=True)
def times_are_fixed() -> Iterator[None]:
    """Engines in this process are told times that depend on no clock, see `tests.fixed_times`."""
    with pytest.MonkeyPatch.context() as patch:
        if "ssd.engine.speculation" in sys.modules:  # tests that open an engine were imported; others need no torch
            from tests.fixed_times import fix_times

            fix_times(patch)
        yield
