"""Which models can be recorded as a CUDA graph, found out without a GPU: on a device that holds no data.

Recording launches kernels that have not run yet, so a step that asks for a value, or copies from the host's memory,
cannot be recorded. On torch's meta device no value can be had either, and copies can be watched.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ssd.drafting.successors import SUCCESSORS
from ssd.model.layers.tap import FINAL
from ssd.model.steps.buffers import StepBuffers, StepShape
from ssd.model.ways.slot_target import SlotTarget
from tests.architectures import ARCHITECTURES, SLOTS, UNTAPPED
from tests.heads import everything
from tests.models import tiny_model

# What transformers has to say about tiny settings.
pytestmark = pytest.mark.filterwarnings("default")

ASKS_THE_HOST = {
    "GPT-2": "item",  # looks for the padding token in its input; published checkpoints have none
    "Phi-3.5-MoE": "host's memory",  # scales its rotary frequencies with a constant kept on the host
}
"""Architectures that are run eagerly, and how that shows."""


class NothingFromTheHost(TorchDispatchMode):
    """Raises where a tensor in the host's memory meets one on the device; single numbers travel with the launch."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        tensors = [leaf for leaf in tree_leaves((args, kwargs, result)) if isinstance(leaf, torch.Tensor)]
        places = {tensor.device.type for tensor in tensors if tensor.ndim or tensor.device.type == "meta"}
        if len(places) > 1:
            raise RuntimeError(f"{func} takes from the host's memory")
        return result


@torch.inference_mode()
def run_without_data(name: str, *, is_tree: bool) -> None:
    """A step of the architecture that keeps hidden states, on the meta device; raises where it needs a value."""
    model = tiny_model(name).to(torch.bfloat16).to("meta")  # grouped products take no other type there
    target = SlotTarget(model, 4, 64, 8)
    layers = UNTAPPED[name][0] if name in UNTAPPED else (0, 1, FINAL)
    target.keep_features(everything(layers, model.config.get_text_config().hidden_size))
    shape = StepShape(2, 4, 64, is_tree)
    buffers = StepBuffers(4, 32, 8, target.device, keeps_top=True)
    with NothingFromTheHost():
        inputs = buffers.inputs(shape, target.kv_cache, None)
        buffers.store(target.score(inputs.tokens, inputs.rows), inputs)
    logits, best, top = buffers.outputs_of(shape, 2, 4)
    assert logits.shape[:2] == best.shape == (2, 4) and best.device.type == "meta"
    assert top is not None and top.shape == (2, 4, 2, SUCCESSORS) and top.device.type == "meta"


@pytest.mark.parametrize("is_tree", [False, True])
@pytest.mark.parametrize("architecture", [name for name, each in ARCHITECTURES.items() if each.kind is SLOTS])
def test_a_step_asks_nothing_of_the_host(architecture: str, is_tree: bool) -> None:
    if architecture in ASKS_THE_HOST:
        with pytest.raises(RuntimeError, match=ASKS_THE_HOST[architecture]):
            run_without_data(architecture, is_tree=is_tree)
    else:
        run_without_data(architecture, is_tree=is_tree)


def test_what_asks_the_host_is_noticed() -> None:
    values = torch.ones(3, device="meta")
    with NothingFromTheHost():
        with pytest.raises(RuntimeError, match="item"):
            values.sum().item()
        with pytest.raises(RuntimeError, match="host's memory"):
            values.copy_(torch.ones(3))
        values.add_(1.0)
