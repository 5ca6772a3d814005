"""A target whose passes differ computes with kernels of our own; interpreted where there is no GPU."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import numpy as np
import pytest
import torch

from tests.triton_here import DEVICE, caches_as_on_a_device, runs_loops

# isort: split
from ssd.model.ways import exactness as settle
from ssd.model.ways.slot_target import SlotTarget
from tests.models import VOCAB, tiny_model

pytestmark = [pytest.mark.filterwarnings("default"), runs_loops]


@pytest.fixture
def target(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Of a device that has our kernels, whose libraries' passes differ."""
    with caches_as_on_a_device():
        target = SlotTarget(deepcopy(tiny_model()).to(DEVICE), 2, 48, 12)
        target.can_verify_trees = True

        def asked(target: SlotTarget) -> tuple[int, str]:
            return (0, "some positions differ") if target.kv_cache.kernel is None else ask(target)

        ask = settle._asked
        monkeypatch.setattr(settle, "_asked", asked)
        monkeypatch.setattr(settle, "_with_own_kernels", lambda _: target)
        monkeypatch.setattr(settle, "_found", {})
        monkeypatch.setattr(settle, "_file", lambda _: None)
        yield target


def logits(target: SlotTarget, text: np.ndarray[Any, Any], *widths: int) -> torch.Tensor:
    """Of all positions, by passes of these widths."""
    found, place = [], 0
    for width in widths:
        part = text[None, place : place + width]
        found.append(target.forward([0], part, [width]).logits[0].clone())
        place += width
    target.rollback(0, 0)
    return torch.cat(found)


@torch.inference_mode()
def test_kernels_of_our_own_are_put_in_and_taken_back(target: SlotTarget) -> None:
    renewed = []
    target.renew_steps = lambda: renewed.append(target.kv_cache.kernel)
    text = np.random.default_rng(0).integers(0, VOCAB, 30)
    before = logits(target, text, 30)
    settle.settle_exactness(target, "on")
    assert target.exactness.holds and target.exactness.num_compared > 50
    assert target.kv_cache.kernel is not None and not target.can_verify_trees and len(renewed) == 1
    expected = logits(target, text, 30)
    torch.testing.assert_close(expected, before, rtol=1e-3, atol=1e-4)
    for widths in ((1,) * 30, (7, 1, 12, 10)):
        assert torch.equal(logits(target, text, *widths), expected)
    settle.settle_exactness(target, "on")
    assert target.exactness.holds and torch.equal(logits(target, text, 29, 1), expected)
    settle.settle_exactness(target, "off")
    assert target.kv_cache.kernel is None and target.can_verify_trees and renewed[-1] is None
    torch.testing.assert_close(logits(target, text, 30), before, rtol=1e-3, atol=1e-4)  # of joined layers


def test_trees_are_not_given_up_unasked(target: SlotTarget) -> None:
    settle.settle_exactness(target, "auto")
    assert not target.exactness.holds and "chains" in target.exactness.reason
    assert target.kv_cache.kernel is None and target.can_verify_trees
