"""Attention on a CPU: what the slow twin says, in the same bits alone and among others."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ssd.model.cpu.cpu_attention import cpu_attention
from ssd.model.kv.kv_cache import AttentionRules, SlotKVCache, SlotRows
from ssd.model.kv.tree import TreeShape

ERRORS = {torch.float32: 2e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}
CPU = torch.device("cpu")


@dataclass
class Case:
    """Slots that hold texts, and what new positions bring."""

    kv_heads: int
    groups: int
    dim: int
    value_dim: int
    held: list[int]
    width: int
    dtype: torch.dtype
    seed: int
    window: int | None = None
    chunk: int | None = None
    softcap: float | None = None
    has_sinks: bool = False

    def __post_init__(self) -> None:
        random = torch.Generator().manual_seed(self.seed)

        def numbers(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=random).to(self.dtype)

        batch, most = len(self.held), max(self.held) + self.width
        self.keys, self.values = (
            numbers(batch, self.kv_heads, most, self.dim),
            numbers(batch, self.kv_heads, most, self.value_dim),
        )
        self.query = numbers(batch, self.kv_heads * self.groups, self.width, self.dim)
        self.sinks = torch.randn(self.kv_heads * self.groups, generator=random) if self.has_sinks else None

    def cache(self) -> SlotKVCache:
        """With what slots hold."""
        cache = SlotKVCache(len(self.held), max(self.held) + self.width + 3, CPU)
        cache.lengths[:] = 0
        rows = SlotRows.build(cache, list(range(len(self.held))), self.keys.shape[2], CPU)
        cache.store(0, rows, self.keys, self.values)
        cache.lengths[:] = self.held
        return cache

    def attend(
        self, cache: SlotKVCache, slots: list[int], query: torch.Tensor, new: int, parents: np.ndarray | None = None
    ) -> torch.Tensor:
        """Of ``new`` positions of these slots, whose keys and values are stored already."""
        trees = None if parents is None else TreeShape.build(parents)
        rows = SlotRows.build(cache, slots, new, CPU, trees)
        rules = AttentionRules(self.dim**-0.5, self.window, self.chunk, self.softcap, self.sinks)
        keys, values = cache._layers[0]
        return cpu_attention(query, keys, values, rows, rules)


cases = st.builds(
    Case,
    kv_heads=st.integers(1, 2),
    groups=st.sampled_from([1, 2, 3, 4, 7]),
    dim=st.sampled_from([1, 8, 16, 20, 64, 80]),
    value_dim=st.sampled_from([1, 16, 24, 64, 144]),
    held=st.lists(st.integers(0, 90), min_size=1, max_size=3),
    width=st.sampled_from([1, 2, 3, 5, 9, 17, 33]),
    dtype=st.sampled_from(list(ERRORS)),
    seed=st.integers(0, 99),
    window=st.sampled_from([None, None, 1, 5, 40]),
    chunk=st.sampled_from([None, None, 4, 32]),
    softcap=st.sampled_from([None, None, 3.0]),
    has_sinks=st.booleans(),
)


@settings(max_examples=60, deadline=None)
@given(case=cases)
def test_it_says_what_the_slow_twin_says(case: Case) -> None:
    found = case.attend(case.cache(), list(range(len(case.held))), case.query, case.width)
    for b, held in enumerate(case.held):
        for head in range(case.kv_heads * case.groups):
            for t in range(case.width):
                wanted = attended(
                    case.query[b, head, t].double().numpy(),
                    case.keys[b, head // case.groups].double().numpy(),
                    case.values[b, head // case.groups].double().numpy(),
                    np.arange(case.keys.shape[2]),
                    held + t,
                    scale=case.dim**-0.5,
                    window=case.window,
                    chunk=case.chunk,
                    softcap=case.softcap,
                    sink=None if case.sinks is None else float(case.sinks[head]),
                )
                np.testing.assert_allclose(found[b, t, head].double().numpy(), wanted, atol=ERRORS[case.dtype] * 4)


@settings(max_examples=80, deadline=None)
@given(case=cases, data=st.data())
def test_a_query_alone_has_the_bits_it_has_among_others(case: Case, data: st.DataObject) -> None:
    cache = case.cache()
    found = case.attend(cache, list(range(len(case.held))), case.query, case.width)
    b = data.draw(st.integers(0, len(case.held) - 1))
    first = data.draw(st.integers(0, case.width - 1))
    new = data.draw(st.integers(1, case.width - first))
    cache.lengths[b] += first
    alone = case.attend(cache, [b], case.query[b : b + 1, :, first : first + new], new)
    assert torch.equal(alone[0], found[b, first : first + new])


@settings(max_examples=80, deadline=None)
@given(case=cases, data=st.data())
def test_a_node_of_a_tree_has_the_bits_it_has_in_a_chain(case: Case, data: st.DataObject) -> None:
    cache = case.cache()
    wanted = case.attend(cache, [0], case.query[:1], case.width)[0]
    size = case.width + data.draw(st.integers(0, 6))
    cache = SlotKVCache(1, case.held[0] + size + 3, CPU)
    rows = SlotRows.build(cache, [0], case.held[0] or 1, CPU)
    if case.held[0]:
        cache.store(0, rows, *(each[:1, :, : case.held[0]] for each in (case.keys, case.values)))
    cache.lengths[0] = case.held[0]
    others = sorted(data.draw(st.sets(st.integers(1, size - 1), max_size=size - case.width))) if size > 1 else []
    path = [node for node in range(size) if node not in others][: case.width]
    parents = np.array([[node - 1 for node in range(size)]])
    for depth, node in enumerate(path):
        parents[0, node] = path[depth - 1] if depth else -1
    parents[0, 0] = -1
    new = {
        name: torch.randn(1, heads, size, dim).to(case.dtype)
        for name, heads, dim in (
            ("query", case.query.shape[1], case.dim),
            ("keys", case.kv_heads, case.dim),
            ("values", case.kv_heads, case.value_dim),
        )
    }
    text = slice(case.held[0], case.held[0] + len(path))
    new["query"][:, :, path] = case.query[:1, :, : len(path)]
    new["keys"][:, :, path], new["values"][:, :, path] = case.keys[:1, :, text], case.values[:1, :, text]
    cache.store(0, SlotRows.build(cache, [0], size, CPU), new["keys"], new["values"])
    found = case.attend(cache, [0], new["query"], size, parents)[0]
    assert torch.equal(found[path], wanted[: len(path)])


def test_keys_beyond_a_querys_own_change_nothing() -> None:
    case = Case(1, 3, 16, 16, [20], 4, torch.float32, 0)
    cache = case.cache()
    before = case.attend(cache, [0], case.query[:, :, :1], 1)
    for stored in cache._layers[0]:
        stored[:, :, 21:] = float("nan")
    assert torch.equal(case.attend(cache, [0], case.query[:, :, :1], 1), before)


def test_what_is_no_number_is_not_hidden() -> None:
    case = Case(1, 1, 16, 16, [20], 1, torch.float32, 0)
    case.query[0, 0, 0, 3] = float("nan")
    assert case.attend(case.cache(), [0], case.query, 1).isnan().all()


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_threads_change_no_bit(threads: int) -> None:
    case = Case(2, 4, 64, 64, [700, 300], 40, torch.float32, 0)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        wanted = case.attend(case.cache(), [0, 1], case.query, 40)
        torch.set_num_threads(threads)
        assert torch.equal(case.attend(case.cache(), [0, 1], case.query, 40), wanted)
    finally:
        torch.set_num_threads(before)


Floats = npt.NDArray[np.float64]


def attended(
    query: Floats,
    keys: Floats,
    values: Floats,
    positions: npt.NDArray[np.int64],
    position: int,
    *,
    scale: float,
    window: int | None,
    chunk: int | None,
    softcap: float | None,
    sink: float | None,
) -> Floats:
    """What a query at ``position`` makes of the keys [n, dim] and values [n, value_dim] of its path."""
    scores, seen = [], []
    for index, at in enumerate(positions.tolist()):
        if at > position or (window is not None and at <= position - window):
            continue
        if chunk is not None and at < position - position % chunk:
            continue
        score = float(query @ keys[index]) * scale
        scores.append(softcap * np.tanh(score / softcap) if softcap is not None else score)
        seen.append(index)
    highest = max([*scores, *([] if sink is None else [sink])])
    weights = np.exp(np.array(scores) - highest)
    total = weights.sum() + (0.0 if sink is None else np.exp(sink - highest))
    return np.asarray((weights[:, None] * values[seen]).sum(0) / total)
