"""The official client as ``make bench-clients`` runs it, against a server with a key."""

from __future__ import annotations

import pytest

from benchmarks.clients.use_openai import KEY, MODEL, Checks, check_openai
from tests.server.bundled_engine import load_bundled
from tests.server.failing_engine import serving


@pytest.mark.slow
def test_the_official_client_gets_what_it_should() -> None:
    checks = Checks("openai")
    with serving(load_bundled, model_names=(MODEL,), api_keys=(KEY,)) as server:
        check_openai(f"{server.url}/v1", KEY, checks)
    assert not checks.failed
    assert len(checks.passed) > 10
