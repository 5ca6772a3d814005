"""Kernels on torch's OpenMP threads: every task is done once, with the same bits on any number of threads."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from ssd.jit.addresses import address, int64_array, kernel
from ssd.model.cpu import cpu_attention as attention
from ssd.model.cpu import cpu_decoder, parallel
from ssd.model.cpu.parallel import factors_of, next_task, numbers_of, run_parallel
from ssd.model.loading.load_target import open_target
from tests.models import tiny_model
from tests.static_targets import have_same_bits


@kernel
def _count(call: int) -> None:  # pragma: no cover - compiled
    numbers, factors = numbers_of(call, 2), factors_of(call, 2, 1)
    counts = int64_array(numbers[0], numbers[1])
    task = next_task(call, -1)
    while task >= 0:
        counts[task] += int(factors[0])
        task = next_task(call, task)


@pytest.fixture
def four_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("work", [0, 1 << 20, 1 << 40])  # on one thread, several tasks at a time, one at a time
@pytest.mark.parametrize("tasks", [1, 2, 3, 64, 10_001])
def test_every_task_is_done_once(four_threads: None, tasks: int, work: int) -> None:
    for _ in range(20):
        counts = np.zeros(tasks, np.int64)
        run_parallel(_count, (address(counts), tasks), tasks, work, factors=(3.0,))
        assert (counts == 3).all()


def test_several_threads_of_python_call_it_at_the_same_time(four_threads: None) -> None:
    counts = np.zeros((8, 5000), np.int64)

    def call(row: int) -> None:
        for _ in range(50):
            run_parallel(_count, (address(counts[row]), 5000), 5000, 1 << 40, factors=(1.0,))

    threads = [threading.Thread(target=call, args=(row,)) for row in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (counts == 50).all()


@kernel
def _fail(call: int) -> None:  # pragma: no cover - compiled
    last = numbers_of(call, 1)[0]
    task = next_task(call, -1)
    while task >= 0:
        if task == last:
            raise ValueError("a task fails")
        task = next_task(call, task)


def test_an_error_on_a_thread_is_raised(four_threads: None, monkeypatch: pytest.MonkeyPatch) -> None:
    printed: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda found: printed.append(str(found.exc_value)))
    for work, error in ((0, ValueError), (1 << 40, RuntimeError)):
        with pytest.raises(error, match="fail"):
            run_parallel(_fail, (50,), 100, work)
    assert printed == ["a task fails"]
    counts = np.zeros(100, np.int64)
    run_parallel(_count, (address(counts), 100), 100, 1 << 40, factors=(1.0,))
    assert (counts == 1).all()


def test_without_openmp_the_calling_thread_does_all_tasks(monkeypatch: pytest.MonkeyPatch, four_threads: None) -> None:
    monkeypatch.setattr(parallel, "_start", lambda: None)
    counts = np.zeros(100, np.int64)
    run_parallel(_count, (address(counts), 100), 100, 1 << 40, factors=(1.0,))
    assert (counts == 1).all()


@pytest.mark.parametrize("name", ["Llama", "Gemma 3"])
def test_layers_have_the_same_bits_on_one_thread_and_on_four(
    monkeypatch: pytest.MonkeyPatch, four_threads: None, name: str
) -> None:
    changes: Any = {"layer_types": ["sliding_attention", "full_attention"]} if name == "Gemma 3" else {}
    targets: list[Any] = [open_target(tiny_model(name, **changes), num_slots=3, max_length=100) for _ in range(2)]
    assert all(cpu_decoder.is_flat(target.model) for target in targets)
    calls: list[Any] = []
    start = parallel._start()
    assert start is not None
    monkeypatch.setattr(parallel, "_start", lambda: lambda *given: calls.append(given) or start(*given))

    many = targets[1].forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        with monkeypatch.context() as patch:
            patch.setattr(parallel, "_WORTH_THREADS", 0)
            return many(*args, **kwargs)

    monkeypatch.setattr(targets[1], "forward", forward)
    have_same_bits(targets[0], targets[1])
    kernels = {given[0] for given in calls}
    assert (
        parallel._code_of(attention._attend) in kernels and parallel._code_of(cpu_decoder._rotate_and_store) in kernels
    )
