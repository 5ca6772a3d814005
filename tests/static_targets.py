"""Targets whose passes have few fixed shapes, beside plain ones."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from ssd.model.cuda_graphs.graph_runner import CaptureFunction, CudaGraphCapture, CudaGraphRunner, run_eagerly
from ssd.model.kv.kv_cache import AttentionKernel
from ssd.model.runners.slot_runner import SlotRunner
from ssd.model.sampling.sampler import Sampler
from tests.models import VOCAB

RECORDERS = [
    "eagerly",
    pytest.param(
        "as a CUDA graph", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device")
    ),
]
"""Ways to run a step; the tests are the same, so where there is a GPU graphs are tested too."""


def recorder_of(name: str) -> CaptureFunction:
    """A fresh one."""
    return run_eagerly if name == "eagerly" else CudaGraphCapture(torch.device("cuda", torch.cuda.current_device()))


def pair_of_targets(
    model: PreTrainedModel,
    recorder: str = "eagerly",
    *,
    num_slots: int = 5,
    max_length: int = 64,
    max_width: int = 9,
    kernel: AttentionKernel | None = None,
    sampler: Sampler | None = None,
) -> tuple[SlotRunner, SlotRunner]:
    """One that makes plain passes and one that makes static ones, over the same weights."""
    if recorder != "eagerly":
        model = model.to("cuda")
        if model._can_set_experts_implementation():
            model.set_experts_implementation("batched_mm")  # the usual one asks the host where types are not bfloat16
    plain, static = (SlotRunner(model, num_slots, max_length, max_width) for _ in range(2))
    static.graph_runner = CudaGraphRunner(
        static, recorder_of(recorder), tolerance=1e-4, kernel=kernel, sampler=sampler, keeps_top=True
    )
    return plain, static


def have_same_bits(one: SlotRunner, other: SlotRunner) -> None:
    """Prompts, chains and trees on both: the same logits, and keys and values of what slots hold, to the bit."""
    random = np.random.default_rng(0)
    for width, tree in ((40, None), (1, None), (7, None), (5, [-1, 0, 0, 2, 1]), (1, None), (16, None)):
        tokens = random.integers(3, VOCAB, (2, width))
        parents = None if tree is None else np.array([tree, list(range(-1, width - 1))])
        said = []
        for target in (one, other):
            said.append(target.forward([2, 0], tokens, [width, width], parents=parents).logits)
            if tree is not None:
                target.accept_paths([2, 0], [width, width], [np.array([0, 2, 3]), np.arange(4)])
        assert torch.equal(*said)
        if tree is None:  # prefill computes no logits, but the next pass reads its keys and values
            for target in (one, other):
                target.prefill([2, 0], tokens[:, :3], [min(3, width)] * 2)
    for found, want in zip(one.kv_cache.tensors(), other.kv_cache.tensors(), strict=True):
        for slot in (2, 0):  # beyond, what was tried at the start
            assert torch.equal(found[slot, :, : one.length(slot)], want[slot, :, : one.length(slot)])
