"""A position's logits are the same bits in every pass, of every architecture that says so; the others say why not."""

from __future__ import annotations

from functools import lru_cache
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ssd.errors import ModelError
from ssd.model.cpu import row_plan
from ssd.model.cpu.row_plan import Product, RowPlan, find_invariant_shapes, with_fastest_rows
from ssd.model.loading.load_target import open_target
from ssd.model.target import Target, pad_rows
from tests.architectures import ARCHITECTURES, SLOTS
from tests.models import VOCAB, tiny_model

# What transformers has to say about tiny settings, and about kernels that are not installed.
pytestmark = pytest.mark.filterwarnings("default")

NUM_SLOTS, LENGTH, WIDTH = 3, 48, 12
CHANGES = {"Llama 4 (chunks, temperature)": {"floor_scale": 8192}}
"""As real ones have it; with a tiny one transformers scales a query twice where a pass is of one position."""
EXACT = [name for name, each in ARCHITECTURES.items() if each.kind is SLOTS]
NOT_EXACT = [name for name in ARCHITECTURES if name not in EXACT]
DTYPES = [torch.float32, torch.bfloat16]


@lru_cache(1)
def opened(name: str, dtype: torch.dtype) -> tuple[Target, np.ndarray, torch.Tensor]:
    """A target, texts, and their logits, each text read alone and in one pass."""
    model = tiny_model(name, **CHANGES.get(name, {})).to(dtype)
    target = open_target(model, num_slots=NUM_SLOTS, max_length=LENGTH, max_draft_tokens=WIDTH, batch_invariant="on")
    texts = np.random.default_rng(3).integers(0, VOCAB, (NUM_SLOTS, LENGTH - 1))
    expected = []
    for text in texts:
        expected.append(target.forward([0], text[None], [len(text)]).logits[0].clone())
        target.rollback(0, 0)
    return target, texts, torch.stack(expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", EXACT)
@settings(max_examples=4)
@given(data=st.data())
def test_any_passes_over_a_text_give_the_same_bits(name: str, dtype: torch.dtype, data: st.DataObject) -> None:
    """Passes over some slots in any order: prompts in chunks, chains of any width, trees, ends taken back, copies."""
    target, texts, expected = opened(name, dtype)
    draw = data.draw
    owner = draw(st.permutations(range(NUM_SLOTS)))  # of each slot, the text it holds
    try:
        for _ in range(draw(st.integers(2, 6))):
            slots = draw(st.lists(st.integers(0, NUM_SLOTS - 1), min_size=1, max_size=NUM_SLOTS, unique=True))
            slots = [slot for slot in slots if target.length(slot) + WIDTH < LENGTH]
            starts = [target.length(slot) for slot in slots]
            counts = [draw(st.integers(1, WIDTH)) for _ in slots]
            parts = [texts[owner[s], at : at + count] for s, at, count in zip(slots, starts, counts, strict=True)]
            kinds = ["prefill", "chains", "chains", *(["trees"] if target.can_verify_trees else [])]
            kind = draw(st.sampled_from(kinds))
            if not slots:
                continue
            if kind == "prefill":
                target.prefill(slots, pad_rows(parts), counts)
                continue
            if kind == "chains":
                found = target.forward(slots, pad_rows(parts), counts).logits
                paths = [np.arange(count) for count in counts]
            else:
                found, paths = read_as_trees(target, slots, parts, draw(st.integers(0, 2**16)))
            for row, (slot, at, path) in enumerate(zip(slots, starts, paths, strict=True)):
                assert torch.equal(found[row, path], expected[owner[slot], at : at + len(path)])
                if draw(st.booleans()):
                    target.rollback(slot, at + draw(st.integers(1, len(path))))
    finally:
        for slot in range(NUM_SLOTS):
            target.rollback(slot, 0)


def read_as_trees(
    target: Target, slots: list[int], parts: list[np.ndarray], seed: int
) -> tuple[torch.Tensor, list[np.ndarray]]:
    """Each text as the path of a tree with other nodes between; the logits of all nodes, and the paths."""
    random = np.random.default_rng(seed)
    trees: list[list[int]] = []
    parents: list[list[int]] = []
    paths: list[np.ndarray] = []
    for part in parts:
        tokens, above, path = [int(part[0])], [-1], [0]
        for token in part[1:]:
            while random.integers(3) == 0 and len(tokens) < WIDTH - 2:
                above.append(int(random.integers(0, len(tokens))))
                tokens.append(int(random.integers(0, VOCAB)))
            if len(tokens) > WIDTH:
                break
            above.append(path[-1])
            path.append(len(tokens))
            tokens.append(int(token))
        trees.append(tokens)
        parents.append(above)
        paths.append(np.array(path))
    counts = [len(tree) for tree in trees]
    fed, above_each = (pad_rows([np.array(row) for row in rows]) for rows in (trees, parents))
    found = target.forward(slots, fed, counts, parents=above_each).logits.clone()
    target.accept_paths(slots, counts, paths)
    return found, paths


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_copied_prefix_goes_on_with_the_same_bits(dtype: torch.dtype) -> None:
    target, texts, expected = opened("Gemma 2 (soft caps)", dtype)
    target.prefill([1], texts[:1, :20], [20])
    target.copy_prefix(1, 2, 17)
    found = target.forward([2], texts[:1, 17:29], [12]).logits[0]
    assert torch.equal(found, expected[0, 17:29])
    for slot in (1, 2):
        target.rollback(slot, 0)


def test_a_number_of_rows_whose_results_agree_by_chance_is_found_out() -> None:
    weight = torch.randn(64, 1, generator=torch.Generator().manual_seed(1))

    def compute(x: torch.Tensor) -> torch.Tensor:
        """Of a single row in eight another result, as where few sums round differently in another order."""
        return x @ weight if len(x) > 1 or x[0, 0] < 1.15 else x @ weight + 1

    assert find_invariant_shapes(lambda x: compute(x).round(decimals=3), 64, 1, torch.float32).min_rows > 1


def test_rows_that_differ_in_few_numbers_once_they_are_rounded_are_found() -> None:
    weight = torch.randint(-8, 9, (2048, 640), generator=torch.Generator().manual_seed(0)).double()  # sums are exact

    def compute(x: torch.Tensor) -> torch.Tensor:
        """Of a single row one bit more, before rounding."""
        sums = (x.double() @ weight).float()
        return (torch.nextafter(sums, sums + 1) if len(x) == 1 else sums).bfloat16()

    assert find_invariant_shapes(compute, 2048, 640, torch.bfloat16).min_rows == 2


def test_where_few_rows_are_computed_in_another_order_more_are() -> None:
    weight = torch.randn(64, 192, generator=torch.Generator().manual_seed(0))

    def compute(x: torch.Tensor) -> torch.Tensor:
        """As two threads of an EPYC: 4 and 8 rows agree with all from 12 on, the others between do not."""
        return x @ weight + (len(x) < 12 and len(x) % 4)

    plan = find_invariant_shapes(compute, 64, 192, torch.float32)
    assert (plan.min_rows, plan.is_exact) == (12, True)
    rows = torch.randn(5, 64)
    assert torch.equal(plan.product(compute, rows), compute(rows.repeat(3, 1))[:5])


def test_rows_are_padded_to_the_fastest_number_that_a_plan_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]

    def padded(rows: torch.Tensor, sides: tuple[int, ...]) -> torch.Tensor:
        now[0] += 0.2
        return torch.nn.functional.pad(rows, sides)

    monkeypatch.setattr(row_plan, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    monkeypatch.setattr(row_plan, "pad", padded)

    def product(usual: float, *fast: int) -> Product:
        """Takes the ``usual`` seconds, and half of them for the ``fast`` numbers of rows."""

        def compute(rows: torch.Tensor) -> torch.Tensor:
            now[0] += usual / 2 if len(rows) in fast else usual
            return rows

        return compute

    cases = {  # the plan, the product and the number of rows that is the fastest for 1, 2 and 3 rows together
        "any": (RowPlan(1, 64), product(1.0, 4), 4),
        "exact from 3": (RowPlan(3, 64), product(1.0, 2, 3), 3),
        "exact from 8": (RowPlan(8, 64), product(1.0, 4), 8),
        "two are slow": (RowPlan(1, 512), product(2.0, 1, 3), 3),
        "padding takes longer": (RowPlan(1, 512), product(0.3, 4), 1),
        "apart": (RowPlan(2, 64), product(1.0, 1, 3), 3),
    }
    plans = {name: plan for name, (plan, _, _) in cases.items()}
    found = with_fastest_rows(plans, [(name, compute, torch.zeros(4, 1)) for name, (_, compute, _) in cases.items()])
    assert {name: plan.min_rows for name, plan in found.items()} == {
        name: wanted for name, (_, _, wanted) in cases.items()
    }
    assert all(plan._replace(min_rows=0) == plans[name]._replace(min_rows=0) for name, plan in found.items())


@pytest.mark.parametrize("name", NOT_EXACT)
def test_a_model_that_is_not_exact_says_so_by_name_and_opens(name: str) -> None:
    model = tiny_model(name)
    target = open_target(model, num_slots=NUM_SLOTS, max_length=LENGTH)
    assert not target.batch_invariance.is_invariant and target.batch_invariance.reason
    with pytest.raises(ModelError, match=type(target.model).__name__) as refused:
        open_target(model, num_slots=NUM_SLOTS, max_length=LENGTH, batch_invariant="on")
    assert target.batch_invariance.reason in str(refused.value)
    off = open_target(model, num_slots=NUM_SLOTS, max_length=LENGTH, batch_invariant="off")
    assert not off.batch_invariance.is_invariant and off.batch_invariance.reason == "switched off"
