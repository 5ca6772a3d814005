"""Chains and trees of drafted tokens: shape, acceptance, the pass over them, what is kept: against a path at a time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.exactness import RandomDrafter
from ssd.config import SamplingParams
from ssd.drafting.protocol import Draft, DraftOutcome, DraftRequest
from ssd.drafting.suffix_drafter import SuffixDrafter
from ssd.engine.acceptance import accept_drafts
from ssd.engine.drafter_backends import validate_draft
from ssd.model.kv.tree import TreeShape, is_tree, leading_chain, path_to
from ssd.model.loading.load_target import open_target
from ssd.model.runners.select_runner import can_verify_trees
from ssd.model.runners.slot_runner import SlotRunner
from ssd.model.sampling.sampler import PassOutput
from ssd.model.sampling.target_tokens import target_tokens
from tests.architectures import ARCHITECTURES, SLOTS
from tests.engines import ask, make_engine, prompt_of, target_of
from tests.models import VOCAB, tiny_model
from tests.reference import target as slow_target
from tests.reference import tree as slow
from tests.reference.noise import coupled_key, key_of
from tests.reference.tree import node_parents
from tests.sampling_rows import make_row
from tests.trees import NUM_TOKENS, trees
from tests.whole_answers import answers_of


def ints(values: list[int]) -> np.ndarray:
    return np.array(values, np.int32)


@given(st.lists(trees(), min_size=1, max_size=4))
def test_the_shape_of_a_pass_equals_the_slow_twin(drafts: list[tuple[list[int], list[int]]]) -> None:
    width = 1 + max(len(tokens) for tokens, _ in drafts)
    shape = TreeShape.build(node_parents([ints(parents) for _, parents in drafts], width))
    for b, (tokens, parents) in enumerate(drafts):
        assert is_tree(ints(parents), len(tokens))
        for node, seen in enumerate(slow.visible(parents)):
            assert set(np.flatnonzero(shape.tree_mask[b, node]).tolist()) == seen
            assert shape.depths[b, node] == slow.depths(parents)[node] == len(seen) - 1
            assert path_to(ints(parents), node) == slow.path_of(parents, node - 1)


@settings(max_examples=300)
@given(trees(), st.integers(0, 2**32 - 1))
def test_acceptance_is_the_best_path_of_plain_decoding(tree: tuple[list[int], list[int]], seed: int) -> None:
    tokens, parents = tree
    # Equal siblings are one token: what stands behind the second is not followed.
    by_path: dict[tuple[int, ...], int] = {}
    for token in range(len(tokens)):
        by_path.setdefault(tuple(tokens[t] for t in slow.path_of(parents, token)), token)
    merged = [by_path[tuple(tokens[t] for t in slow.path_of(parents, token))] == token for token in range(len(tokens))]

    def choose(said: list[int]) -> int:
        return int(np.random.default_rng([seed, *said]).integers(NUM_TOKENS))

    chosen = np.array([choose([tokens[t] for t in slow.path_of(parents, node - 1)]) for node in range(len(tokens) + 1)])
    fed, above = np.array([[0, *tokens]]), node_parents([ints(parents)], len(tokens) + 1)
    paths, said, sizes = accept_drafts(fed, chosen[None], np.array([len(tokens) + 1]), above, True)
    path, output = paths[0, : sizes[0]], said[0, : sizes[0]].tolist()
    plain: list[int] = []
    for _ in output:
        plain.append(choose(plain))
    assert output == plain
    assert [tokens[node - 1] for node in path[1:]] == output[:-1]
    if all(merged):
        assert output == slow.output_of(tokens, parents, choose)


@settings(max_examples=100)
@given(
    st.lists(
        st.tuples(
            trees(max_size=7),
            st.booleans(),
            st.builds(
                SamplingParams,
                temperature=st.sampled_from([0.0, 0.3, 1.0, 1.7]),
                repetition_penalty=st.sampled_from([1.0, 1.3]),
                presence_penalty=st.sampled_from([0.0, 0.5]),
                frequency_penalty=st.sampled_from([0.0, 0.7]),
                logit_bias=st.sampled_from([(), ((2, 5.0),)]),
                min_tokens=st.sampled_from([0, 3]),
                allowed_token_ids=st.sampled_from([None, (3, 5), (1, 2, 3, 4, 5, 6, 7)]),
                bad_words=st.sampled_from([(), ((4,), (1, 2)), ((1, 1, 2), (3,), (5,))]),
                top_k=st.sampled_from([-1, 0, 1, 3, 100]),
                top_p=st.sampled_from([0.05, 0.5, 0.93, 1.0]),
                min_p=st.sampled_from([0.0, 0.1, 1.0]),
            ),
        ),
        min_size=1,
        max_size=3,
    ),
    st.integers(0, 2**32 - 1),
    st.sampled_from([0, 1, 8]),
)
def test_each_node_is_sampled_after_its_own_path(rows: list[Any], seed: int, window: int) -> None:
    """With the noise of the path, too: of its length, or coupled, of its last tokens."""
    logits = torch.from_numpy(np.random.default_rng(seed).normal(0, 2, (len(rows), 8, 12)).astype(np.float32))
    made = [
        make_row(
            params,
            prompt=[1, 2],
            output=[4],
            draft=tokens,
            parents=None if is_chain else parents,
            seed=seed,
            choice_index=b,
            window=window,
            forbidden_ids=(3, 5),
        )
        for b, ((tokens, parents), is_chain, params) in enumerate(rows)
    ]
    chosen = target_tokens(PassOutput(logits), made)
    for b, ((tokens, parents), is_chain, params) in enumerate(rows):
        above = list(range(-1, len(tokens) - 1)) if is_chain else parents
        for node in range(len(tokens) + 1):
            said = [4, *(tokens[t] for t in slow.path_of(above, node - 1))]
            scores = slow_target.penalised(logits[b, node].tolist(), params, [1, 2], said, [3, 5])
            key = coupled_key(seed, b, [1, 2, *said], window) if window else key_of(seed, b, 2 + len(said))
            assert chosen[b, node] == slow_target.token_at(scores, params, key)


@given(trees(), st.lists(st.integers(0, NUM_TOKENS - 1), max_size=8))
def test_a_draft_agrees_with_a_text_up_to_the_first_difference(
    tree: tuple[list[int], list[int]], text: list[int]
) -> None:
    tokens, parents = tree
    draft, chain = Draft(ints(tokens), parents=ints(parents)), Draft(ints(tokens))
    assert draft.path_of(text).tolist() == slow.path_of_text(tokens, parents, text)
    assert chain.path_of(text).tolist() == slow.path_of_text(tokens, range(-1, len(tokens) - 1), text)


PROMPT_LENGTHS = {3: 17, 0: 4, 2: 11}
"""By slot; the windows and chunks of the tiny models are 6 long."""


@pytest.mark.parametrize("architecture", [name for name, each in ARCHITECTURES.items() if each.kind is SLOTS])
def test_a_pass_over_trees_gives_the_logits_of_every_path_and_keeps_one(architecture: str) -> None:
    target, plain = (open_target(tiny_model(architecture), num_slots=4, max_length=64) for _ in range(2))
    assert isinstance(target, SlotRunner) and isinstance(plain, SlotRunner) and target.can_verify_trees
    random = np.random.default_rng(5)
    texts = {slot: random.integers(3, VOCAB, length).tolist() for slot, length in PROMPT_LENGTHS.items()}
    for slot, text in texts.items():
        target.prefill([slot], np.array([text]), [len(text)])
    for _ in range(3):
        rows, drafts = {}, {}
        for slot in texts:
            size = int(random.integers(0, 8))
            drafts[slot] = None if slot == 2 else ints([int(random.integers(-1, i)) for i in range(size)])
            rows[slot] = random.integers(3, VOCAB, 1 + size).tolist()
        counts = [len(row) for row in rows.values()]
        padded = np.array([row + [0] * (max(counts) - len(row)) for row in rows.values()])
        nodes = node_parents(list(drafts.values()), max(counts))
        logits = target.forward(list(texts), padded, counts, parents=nodes).logits
        paths = []
        for b, (slot, row) in enumerate(rows.items()):
            parents = drafts[slot]
            chain = list(range(-1, len(row) - 2)) if parents is None else parents.tolist()
            for node in range(len(row)):
                path = [0, *(token + 1 for token in slow.path_of(chain, node - 1))]
                fed = np.array([[*texts[slot], *(row[n] for n in path)]])
                expected = plain.forward([1], fed, [fed.shape[1]]).logits[0, -1]
                assert torch.allclose(logits[b, node], expected, rtol=1e-3, atol=2e-4)
                plain.rollback(1, 0)
            paths.append(np.array([0, *(t + 1 for t in slow.path_of(chain, int(random.integers(-1, len(row) - 1))))]))
        target.accept_paths(list(texts), counts, paths)
        for (slot, row), kept in zip(rows.items(), paths, strict=True):
            texts[slot] += [row[node] for node in kept]
            assert_holds(target, slot, texts[slot], plain)


def assert_holds(target: SlotRunner, slot: int, text: list[int], plain: SlotRunner) -> None:
    """The slot's keys and values are those of decoding ``text`` plainly."""
    assert target.length(slot) == len(text)
    for token in text:
        plain.forward([1], np.array([[token]]), [1])
    for layer, (keys, values) in plain.kv_cache._layers.items():
        for ours, theirs in zip(target.kv_cache._layers[layer], (keys, values), strict=True):
            assert torch.allclose(ours[slot, :, : len(text)], theirs[1, :, : len(text)], rtol=1e-3, atol=2e-4)
    plain.rollback(1, 0)


def test_only_what_is_not_in_place_is_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    target = open_target(tiny_model(), num_slots=2, max_length=64)
    assert isinstance(target, SlotRunner)
    moved: list[list[list[int]]] = []
    move = target.kv_cache.move
    monkeypatch.setattr(target.kv_cache, "move", lambda moves: (moved.append(moves.tolist()), move(moves)))
    tokens, parents = np.array([[5, 6, 7, 8, 9]] * 2), np.array([[-1, 0, 0, 1, 2]] * 2)
    for paths in ([[0, 1], [0]], [[0, 1, 3], [0, 2]]):
        target.forward([0, 1], tokens, [5, 5], parents=parents)
        target.accept_paths([0, 1], [5, 5], [np.array(path) for path in paths])
    assert moved == [[[0, 1], [5, 3], [4, 2]]]  # slots, from, to
    assert [target.length(slot) for slot in (0, 1)] == [5, 3]


def test_a_model_that_mixes_neighbours_outside_attention_gets_no_trees() -> None:
    model = tiny_model()
    target = SlotRunner(model, 2, 32, 8)
    assert can_verify_trees(target, tolerance=1e-3)
    mlp = model.model.layers[0].mlp
    forward = mlp.forward
    mlp.forward = lambda x: forward(x + torch.nn.functional.pad(x, (0, 0, 1, 0))[:, :-1])
    assert not can_verify_trees(target, tolerance=1e-3)

    def broken(x: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("broken on purpose")

    mlp.forward = broken
    assert not can_verify_trees(target, tolerance=1e-3)
    assert target.length(0) == 0


@given(st.integers(0, 2**32 - 1), st.integers(1, 5), st.integers(1, 9))
def test_a_draft_is_accepted_up_to_the_first_difference(seed: int, num_rows: int, width: int) -> None:
    random = np.random.default_rng(seed)
    fed, chosen = (random.integers(0, 2, (num_rows, width)) for _ in range(2))
    counts = random.integers(1, width + 1, num_rows)
    expected = []
    for b in range(num_rows):
        draft, said = fed[b, 1 : counts[b]].tolist(), chosen[b].tolist()
        expected.append(next((i for i, token in enumerate(draft) if token != said[i]), len(draft)))
    paths, said, sizes = accept_drafts(fed, chosen, counts, fed, False)
    assert (sizes - 1).tolist() == expected
    for b, size in enumerate(sizes):
        assert paths[b, :size].tolist() == list(range(size)) and said[b, :size].tolist() == chosen[b, :size].tolist()


# -- in the engine ---------------------------------------------------------------------------------------------------


class Disordered(RandomDrafter):
    """Trees that are none: a parent behind its child, itself, too few, too many; one too large; no tokens at all."""

    _parents = ([1, -1, 0], [0, 0, 1], [-1, -1], [-1, 0, 1, 2], [-2, -1, 0])
    calls = 0

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        self.calls += 1
        number = self.calls % (len(self._parents) + 2)
        if number > len(self._parents):
            return [Draft(np.full(3, VOCAB + 5, np.int32))] * len(requests)
        if number == len(self._parents):
            return [Draft(np.full(90, 7, np.int32), parents=np.full(90, -1, np.int32)) for _ in requests]
        return [Draft(np.full(3, 7, np.int32), parents=np.array(self._parents[number], np.int32)) for _ in requests]


def test_what_is_no_tree_is_a_counter_and_changes_nothing() -> None:
    asked = [ask(str(seed), prompt_of(seed), max_tokens=14) for seed in (1, 2)]
    engine = make_engine(Disordered(VOCAB), limit=8, shape="tree")
    found = answers_of(engine, asked)
    assert engine.metrics.drafter_failures > 5
    assert engine.metrics.num_draft_tokens > 0  # the one that was too big was cut
    assert found == answers_of(make_engine("none"), asked)


class Asked(RandomDrafter):
    """Notes whether it was asked for trees."""

    def __init__(self) -> None:
        super().__init__(VOCAB)
        self.trees: set[bool] = set()

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        self.trees |= {request.allow_tree for request in requests}
        return super().propose(requests)


@pytest.mark.parametrize(
    ("shape", "count", "expected"),
    [("tree", 1, True), ("chain", 1, False), ("auto", 1, True), ("auto", 2, False), ("on falcon", 1, False)],
)
def test_trees_are_asked_for_where_they_can_be_verified(
    shape: Any, count: int, expected: bool, caplog: pytest.LogCaptureFixture
) -> None:
    drafter, on_falcon = Asked(), shape == "on falcon"
    target = target_of("falcon", batch_invariant="auto") if on_falcon else target_of()
    engine = make_engine(drafter, target, shape="tree" if on_falcon else shape)
    # Where there are two, neither is ever alone.
    asked = [ask(str(i), (5, 6 + i), max_tokens=3 if count == 1 else 1, temperature=1.0) for i in range(count)]
    answers_of(engine, asked)
    assert drafter.trees == {expected} and ("verifies only chains" in caplog.text) == on_falcon


def test_the_last_step_of_a_tree_teaches_every_token_that_was_tested() -> None:
    """The text is not seen again, so the path says what came: its tokens, and which siblings did not."""
    text = np.array([3, 4, 5, 3, 4, 6, 3, 4, 5, 3, 4], np.int32)
    learned = {}
    for name in ("path", "none accepted", "unknown", "cut"):
        drafter = SuffixDrafter(default_token_cost=0.01)
        draft = drafter.propose([DraftRequest("a", text, 3, None, 8, allow_tree=True)])[0]
        assert draft.parents is not None and len(draft.token_ids) == 8
        parents = draft.parents.tolist()
        before = drafter.model_of(None).num_learned
        child = parents.index(0)
        path = np.array([0, child], np.int32)
        told, accepted = {
            "path": (Draft(draft.token_ids, parents=draft.parents, path=path), 2),
            "none accepted": (Draft(draft.token_ids, parents=draft.parents, path=path[:0]), 0),
            "unknown": (draft, 2),
            "cut": (Draft(draft.token_ids[:1], parents=draft.parents[:1], path=path[:1]), 1),
        }[name]
        drafter.observe([DraftOutcome("a", told, accepted)])
        drafter.finish("a")
        learned[name] = drafter.model_of(None).num_learned - before
    tested = [parent for parent in parents if parent in (-1, 0, child)]
    assert learned == {"path": len(tested), "none accepted": parents.count(-1), "unknown": 0, "cut": 1}


@given(st.lists(st.integers(0, 9), max_size=8), st.lists(st.integers(-2, 8), max_size=8), st.integers(0, 9))
def test_what_is_no_tree_is_refused_and_what_is_too_big_is_cut(
    tokens: list[int], parents: list[int], limit: int
) -> None:
    found = validate_draft(Draft(ints(tokens), parents=ints(parents)), limit, allow_tree=True)
    is_one = len(parents) == len(tokens) and all(-1 <= parent < i for i, parent in enumerate(parents))
    if not is_one:
        assert found is None
        return
    assert found is not None and found.token_ids.tolist() == tokens[:limit]
    kept = list(range(-1, len(found.token_ids) - 1)) if found.parents is None else found.parents.tolist()
    assert kept == parents[:limit]
    chain = validate_draft(Draft(ints(tokens), parents=ints(parents)), limit, allow_tree=False)
    assert chain is not None and chain.parents is None
    assert chain.token_ids.tolist() == tokens[: min(limit, leading_chain(ints(parents)))]
