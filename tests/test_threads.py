"""How many threads a CPU's passes get."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ssd.model.loading import threads
from ssd.model.loading.load_target import open_target
from ssd.model.loading.threads import fastest, settle_threads
from ssd.model.target import Target
from tests.models import tiny_model


@pytest.fixture(autouse=True)
def as_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    yield
    torch.set_num_threads(before)


def tiny_target(name: str = "Llama") -> Target:
    return open_target(tiny_model(name), num_slots=1, max_length=40)


def pretend(monkeypatch: pytest.MonkeyPatch, seconds: dict[int, float]) -> list[int]:
    """Passes take what ``seconds`` says of the threads in use; returns the threads that were tried."""
    tried: list[int] = []

    def timed(_target: Target, width: int) -> float:
        tried.append(torch.get_num_threads())
        return seconds[tried[-1]] * width

    monkeypatch.setattr(threads, "_seconds", timed)
    return tried


@pytest.mark.parametrize("best", [1, 2, 4])
def test_the_fastest_is_used(monkeypatch: pytest.MonkeyPatch, best: int) -> None:
    tried = pretend(monkeypatch, {count: 0.002 if count == best else 0.003 for count in (1, 2, 4)})
    assert settle_threads(tiny_target()) == best == torch.get_num_threads()
    assert set(tried) == {1, 2, 4}


def test_a_small_model_is_opened_by_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    used: set[int] = set()
    model = tiny_model()
    model.register_forward_pre_hook(lambda *_: used.add(torch.get_num_threads()))
    open_target(model, num_slots=1, max_length=40)
    assert used == {1} and torch.get_num_threads() == 4


def test_the_environment_has_the_last_word(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = pretend(monkeypatch, {})
    monkeypatch.setenv("OMP_NUM_THREADS", "4")
    assert settle_threads(tiny_target()) == 4 and tried == []


@given(st.dictionaries(st.integers(1, 64), st.tuples(st.floats(1e-4, 1), st.floats(1e-4, 1)), min_size=1))
def test_kinds_of_pass_count_alike(seconds: dict[int, tuple[float, float]]) -> None:
    best = fastest({count: list(times) for count, times in seconds.items()})
    products = {count: a * b for count, (a, b) in seconds.items()}
    assert products[best] <= min(products.values()) * (1 + 1e-9)
