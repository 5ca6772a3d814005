"""The tap: hidden states of chosen layers, taken out of a model's own forward pass by hooks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from ssd.errors import ModelError, first_line
from ssd.model.kv.attention import ATTENTION_NAME
from ssd.model.layers.replace import agrees, probe_texts

FINAL: Final = -1
"""The hidden state that the output layer reads: behind the last decoder layer and the final norm."""

_MOST_ERROR = 1e-5


@dataclass(frozen=True, slots=True, eq=False)
class Tapped:
    """What is wanted of every position.

    ``layers`` : whose hidden states: k for what comes out of the first k decoder layers, 0 for what goes into the
    first, FINAL. ``combine`` : makes the features of them, as ``ssd.model.heads.head.Head.combine`` does. ``size`` :
    numbers of a position's features. ``bytes_per_token`` : what else is kept of each position, for who reads them.
    """

    layers: tuple[int, ...]
    combine: Callable[[Sequence[torch.Tensor]], torch.Tensor]
    size: int
    bytes_per_token: int = 0


class Tap:
    """Hooks on a model, until `remove`, that keep hidden states while a pass is listened to."""

    def __init__(self, model: PreTrainedModel, layers: Sequence[int]) -> None:
        """Raises ModelError where the model has no such layers, or its layers are not to be found."""
        self._layers = tuple(layers)
        self._is_listening = False
        self._seen: dict[int, torch.Tensor] = {}
        self._hooks: list[RemovableHandle] = []
        decoder, found = decoder_layers(model)
        for layer in sorted(set(layers)):
            if not FINAL <= layer <= len(found):
                raise ModelError(
                    f"the draft head reads behind layer {layer}, and {type(model).__name__} has {len(found)}: it was "
                    "made for another model"
                )
            if layer == 0:
                self._hooks.append(found[0].register_forward_pre_hook(self._before_all, with_kwargs=True))
            else:
                module = decoder if layer == FINAL else found[layer - 1]
                self._hooks.append(module.register_forward_hook(partial(self._after, layer)))

    def remove(self) -> None:
        """Leave the model as it was."""
        for hook in self._hooks:
            hook.remove()

    @contextmanager
    def listening(self) -> Iterator[list[torch.Tensor]]:
        """Fills the list it gives with the hidden states [B, T, hidden size] of the one pass made meanwhile.

        In the order of the layers asked for; filled when the context ends.
        """
        taken: list[torch.Tensor] = []
        self._is_listening = True
        try:
            yield taken
            taken += [self._seen[layer] for layer in self._layers]
        finally:
            self._is_listening = False
            self._seen.clear()  # what a recorded pass allocates must not be kept

    def _after(self, layer: int, _module: nn.Module, _given: Any, output: Any) -> None:
        if self._is_listening:
            self._seen[layer] = output if isinstance(output, torch.Tensor) else output[0]

    def _before_all(self, _module: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> None:
        if self._is_listening:
            self._seen[0] = given[0] if given else named["hidden_states"]


def decoder_layers(model: PreTrainedModel) -> tuple[nn.Module, nn.ModuleList]:
    """The decoder of a model and the list of its layers; raises ModelError where they are not to be found."""
    count = model.config.get_text_config().num_hidden_layers
    for decoder in (model.get_decoder(), *model.modules()):
        lists = [each for each in decoder.children() if isinstance(each, nn.ModuleList) and len(each) == count]
        if len(lists) == 1:
            return decoder, lists[0]
    raise ModelError(_refusal(model, f"no list of its {count} layers is found"))


@torch.inference_mode()
def require_tap(model: PreTrainedModel, layers: Sequence[int]) -> None:
    """Raise ModelError, saying why, unless a tap gives what the model itself says its hidden states are.

    Two plain passes over 13 tokens.
    """
    tap = Tap(model, layers)
    read: list[torch.Tensor] = []
    hook = model.get_output_embeddings().register_forward_pre_hook(lambda _module, given: read.append(given[0]))
    ids = torch.from_numpy(probe_texts(model)[:1]).to(model.device)
    if model.config._attn_implementation == ATTENTION_NAME:  # another target drives this model already
        model.set_attn_implementation("eager")
    try:
        with tap.listening() as taken:
            states = model(input_ids=ids, use_cache=False, output_hidden_states=True).hidden_states
    except Exception as failure:
        raise ModelError(_refusal(model, first_line(failure))) from failure
    finally:
        hook.remove()
        tap.remove()
    for layer, found in zip(layers, taken, strict=True):
        if found.ndim != 3:
            raise ModelError(_refusal(model, f"its hidden states have {found.ndim} dimensions, not 3"))
        # The last one that a model gives out has gone through the final norm.
        expected = read[0] if layer == FINAL else states[layer] if layer < len(states) - 1 else None
        if expected is not None and not agrees(found, expected, _MOST_ERROR):
            where = "the output layer" if layer == FINAL else "the next layer"
            raise ModelError(_refusal(model, f"what its layers put out is changed before {where} reads it"))


def _refusal(model: PreTrainedModel, reason: str) -> str:
    return f"a draft head cannot read the hidden states of {type(model).__name__}: {reason}. Leave the draft head out"
