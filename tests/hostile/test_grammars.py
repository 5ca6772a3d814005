"""Grammars: their memory is within a budget that tenants share, and who asks for costly ones waits for them."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ssd.bundled import MODEL_PATH
from ssd.config import StructuredOutput
from ssd.text import grammar_memory
from ssd.text.codec import TextCodec
from ssd.text.grammar import MaskThreads
from ssd.text.grammar_compiler import GrammarCompiler
from ssd.text.grammar_memory import Compiled, GrammarCost, GrammarMemory, GrammarReservation, allocated_bytes, trim_soon

MB = 1 << 20


def regex(number: int) -> StructuredOutput:
    return StructuredOutput("regex", f"{number}")


def compiled(num_bytes: int) -> Compiled:
    return Compiled(object(), GrammarCost(num_bytes, 0.1))


def test_nobody_loses_a_kept_grammar_to_who_keeps_more() -> None:
    memory = GrammarMemory(64 * MB)
    for number in range(3):
        memory.store("honest", regex(number), compiled(5 * MB))
    for number in range(100):
        memory.store("greedy", regex(number), compiled(MB))
        assert memory.num_bytes <= 32 * MB
    assert all(memory.find("honest", regex(number)) for number in range(3))
    found = [number for number in range(100) if memory.find("greedy", regex(number))]
    assert found == list(range(83, 100))  # its latest, in what is left
    for number in range(400):
        memory.store(f"tenant {number}", regex(0), compiled(1))
    assert sum(map(len, memory._kept.values())) <= 256


def test_large_grammars_wait_for_room_and_small_ones_do_not() -> None:
    memory = GrammarMemory(64 * MB)

    def open_one(num_bytes: int, may_refuse: bool = True) -> GrammarReservation | None:
        return memory.open(GrammarCost(num_bytes, 0.1), None, lambda: compiled(num_bytes), may_refuse=may_refuse)

    memory.store(None, regex(0), compiled(30 * MB))
    first = open_one(1000 * MB)  # one alone is never refused, and what is only kept leaves
    assert first is not None and memory.find(None, regex(0)) is None
    assert open_one(MB) is None and open_one(40 * MB) is None
    small = [open_one(MB // 2) for _ in range(16)]
    assert None not in small
    forced = open_one(MB, may_refuse=False)
    assert forced is not None
    del first
    gc.collect()
    second = open_one(40 * MB)
    assert second is not None and memory.num_bytes == 49 * MB
    assert open_one(40 * MB) is None


def test_costly_masks_are_made_for_tenants_in_turn_the_shortest_first() -> None:
    threads, gate, order = MaskThreads(), threading.Event(), list[Any]()
    made = [threads.submit_costly("greedy", 0.1, lambda: order.extend([] if gate.wait(20) else ["late"]))]
    time.sleep(0.05)
    for number, (tenant, costs_s) in enumerate(
        [("greedy", 9.0), ("greedy", 5.0), ("greedy", 0.1), ("honest", 0.5), ("honest", 0.1), (None, 3.0)]
    ):
        made.append(threads.submit_costly(tenant, costs_s, lambda number=number: order.append(number)))  # type: ignore[misc]
    gate.set()
    for each in made:
        each.result(20)
    assert order == [4, 5, 2, 3, 1, 0]


def test_one_that_is_kept_takes_only_its_own_part_and_does_not_push_itself_out() -> None:
    memory, kept = GrammarMemory(64 * MB), compiled(32 * MB)
    memory.store(None, regex(0), kept)
    opened = [memory.open(kept.weight, kept, lambda: kept, may_refuse=True) for _ in range(8)]
    assert None not in opened and memory.num_bytes == 64 * MB and memory.find(None, regex(0)) is kept
    assert [each.costs_s for each in opened if each is not None] == [0.0] * 8


def resident_mb() -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmRSS")).split()[1]) / 1024


@pytest.mark.slow
def test_many_large_grammars_take_what_the_budget_says() -> None:
    pytest.importorskip("llguidance")
    in_a_new_process(open_large_grammars)


def open_large_grammars() -> None:
    codec = TextCodec.load(str(MODEL_PATH))
    made = GrammarCompiler(codec, vocab_size=codec.vocab_size, eos_token_ids=codec.eos_token_ids, max_bytes=200 * MB)
    made.compile(regex(0)).masks([])
    first = made.compile(StructuredOutput("regex", "(a{900}){999}"))  # its threads and their allocator's areas stay
    while not first.is_ready() and first.is_busy:
        time.sleep(0.01)
    first.release_memory()
    del first
    made.memory = GrammarMemory(200 * MB)
    gc.collect()
    wait_until_trimmed()
    before, allocated = resident_mb(), allocated_bytes()
    states = []
    most = 0.0
    for number in range(30):
        state = made.compile(StructuredOutput("regex", f"(a{{900}}){{{1000 + number}}}"))
        states.append(state)
        while not state.is_ready() and state.is_busy:
            time.sleep(0.01)
            most = max(most, resident_mb() - before)
    wait_until_trimmed()
    used, grown, resident = made.memory.num_bytes / MB, (allocated_bytes() - allocated) / MB, resident_mb() - before
    num_open = sum(state._matcher is not None for state in states)
    print(
        f"\n{num_open} of 30 are open: {used:.0f} MB as weighed, {grown:.0f} MB allocated, {resident:.0f} MB resident"
    )
    print(f"at most {most:.0f} MB were resident")
    assert 2 <= num_open < 10 and used <= 200 and 0.8 * used < grown < 1.2 * used and most < 1.5 * 200
    for state in states:
        state.release_memory()
    del states, state
    gc.collect()
    wait_until_trimmed()
    left = (allocated_bytes() - allocated) / MB
    print(f"afterwards {left:.1f} MB are allocated, {resident_mb() - before:.0f} MB resident")
    assert made.memory.num_bytes == 0 and left < 2, "all of it is freed"
    # Pages that freed and other objects share stay: how many depends on the order in which threads allocated them.
    assert resident_mb() - before < resident / 2, "most of it is given back to the system"


@pytest.mark.slow
def test_what_masks_add_to_grammars_that_are_kept_is_within_the_budget() -> None:
    """Sources of 20 characters, whose automata grow by 15 to 22 MB in 600 tokens. Half of the budget holds two."""
    pytest.importorskip("llguidance")
    in_a_new_process(grow_kept_grammars)


def grow_kept_grammars() -> None:
    codec = TextCodec.load(str(MODEL_PATH))
    made = GrammarCompiler(codec, vocab_size=codec.vocab_size, eos_token_ids=codec.eos_token_ids, max_bytes=80 * MB)
    made.compile(regex(0)).masks([])
    wait_until_trimmed()
    before, allocated, random = resident_mb(), allocated_bytes(), np.random.default_rng(0)
    for number in range(10):
        state = made.compile(StructuredOutput("regex", f"(.{{0,{500 + number}}}x){{0,60}}"))
        for _ in range(600):
            mask = state.masks([])[0].copy()
            mask[list(codec.eos_token_ids)] = False
            state.advance([int(random.choice(np.flatnonzero(mask)))])
        state.release_memory()
    wait_until_trimmed()
    used, grown, resident = made.memory.num_bytes / MB, (allocated_bytes() - allocated) / MB, resident_mb() - before
    print(f"\n{used:.0f} MB as weighed, {grown:.0f} MB allocated, {resident:.0f} MB resident")
    assert 15 < used <= 40 and grown < 1.2 * 40 and resident < 80


def in_a_new_process(function: Callable[[], None]) -> None:
    """Run a function in a new process, because this process may reuse memory that earlier tests have freed."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        pool.submit(function).result()


def wait_until_trimmed() -> None:
    """Until what was freed before the call has been given back to the system."""
    trim_soon()
    while (timer := grammar_memory._trim) is not None:
        timer.join()
