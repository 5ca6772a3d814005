"""What the system refuses of memory costs one answer and not the process."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.hostile.test_attacks import SMALL
from tests.server.client import post, until_ready
from tests.server.test_process import running

MB = 1 << 20
TEXTS = {
    "more tokens than are taken": ("x = 1\n" * 700_000, {400}),
    "many tokens for each character": ("\U0001f600" * 600_000, {400}),
    "few tokens": (" " * 4_000_000, {200, 503}),
}


@pytest.fixture(scope="module")
def server() -> Iterator[tuple[int, int]]:
    """Process id and port."""
    with running(*SMALL) as (process, port):
        until_ready(port, process)
        yield process.pid, port


@pytest.mark.parametrize(("text", "statuses"), TEXTS.values(), ids=TEXTS)
@pytest.mark.parametrize("room_mb", [96, 16384])
def test_a_long_text_to_tokenise_is_answered_whatever_memory_there_is(
    server: tuple[int, int], text: str, statuses: set[int], room_mb: int
) -> None:
    process, port = server
    assert post(port, "/tokenize", {"prompt": "x"}).status == 200
    pages = int(Path(f"/proc/{process}/statm").read_text().split()[0])
    limits = resource.prlimit(process, resource.RLIMIT_AS)
    resource.prlimit(process, resource.RLIMIT_AS, (pages * resource.getpagesize() + room_mb * MB, limits[1]))
    try:
        answer = post(port, "/tokenize", {"prompt": text})
    finally:
        resource.prlimit(process, resource.RLIMIT_AS, limits)
    assert answer.status in statuses, answer
    assert post(port, "/tokenize", {"prompt": "x"}).status == 200, "the process goes on"
