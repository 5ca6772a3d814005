"""Hooks that collect the hidden states of selected layers in a model's forward pass, as input of a draft head."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from ctypes import memmove
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
"""The layer number that stands for the hidden state after the final norm, which the output layer reads."""

_MAX_ERROR = 1e-5


@dataclass(frozen=True, slots=True, eq=False)
class FeatureSpec:
    """Which hidden states of the target a draft head reads, and what is stored of them.

    Layer number k stands for the output of the first k decoder layers, 0 for the embeddings, and `FINAL` for the hidden
    state after the final norm.
    """

    layers: tuple[int, ...]  # see `Head.feature_layers`
    # Returns the values to store, [..., size], for the hidden states of each layer, see `Head.combine`. None: the
    # hidden states are stored as they are, one layer after another. This is possible only on a CPU.
    combine: Callable[[Sequence[torch.Tensor]], torch.Tensor] | None
    size: int  # the number of stored values per position
    bytes_per_token: int = 0  # the draft head's own memory per position, without the features


def store_hidden_states(
    hidden: Sequence[torch.Tensor], slots: Sequence[int], starts: Sequence[int], stored: torch.Tensor
) -> None:
    """Copy the hidden states of new tokens, [B, T, size] for each layer, to ``stored``, [slots, layers, length, size].

    Row b belongs to slot ``slots[b]``, and its first token to position ``starts[b]``. On a CPU only, where the
    library's indexed assignment takes twice as long.
    """
    layer_bytes, bytes_per_token = stored.stride(1) * stored.itemsize, stored.stride(2) * stored.itemsize
    for layer, states in enumerate(hidden):
        rows = states.to(stored.dtype).contiguous()
        assert rows.shape[2] == stored.shape[3] and max(starts) + rows.shape[1] <= stored.shape[2]
        source, num_bytes = rows.data_ptr(), rows.shape[1] * rows.shape[2] * rows.itemsize
        begin = stored.data_ptr() + layer * layer_bytes
        for slot, start in zip(slots, starts, strict=True):
            memmove(begin + slot * len(hidden) * layer_bytes + start * bytes_per_token, source, num_bytes)
            source += num_bytes


class HiddenStateTap:
    """Forward hooks on a model that collect the hidden states of selected layers in the context `recording`.

    Raises ModelError if the model has no layer of one of these numbers, or if its list of layers is not found. Call
    `remove` to remove the hooks.
    """

    def __init__(self, model: PreTrainedModel, layers: Sequence[int]) -> None:
        self._layers = tuple(layers)
        self._is_recording = False
        self._hidden: dict[int, torch.Tensor] = {}
        self._hooks: list[RemovableHandle] = []
        decoder, found = decoder_layers(model)
        for layer in sorted(set(layers)):
            if not FINAL <= layer <= len(found):
                raise ModelError(
                    f"the draft head reads the output of layer {layer}, but {type(model).__name__} has only "
                    f"{len(found)} layers: use the head that was trained for this model"
                )
            if layer == 0:
                self._hooks.append(found[0].register_forward_pre_hook(self._before_all, with_kwargs=True))
            else:
                module = decoder if layer == FINAL else found[layer - 1]
                self._hooks.append(module.register_forward_hook(partial(self._after, layer)))

    def remove(self) -> None:
        for hook in self._hooks:
            hook.remove()

    @contextmanager
    def recording(self) -> Iterator[list[torch.Tensor]]:
        """Collect the hidden states of one forward pass, [B, T, hidden size] for each layer, in the yielded list.

        The list is filled when the context ends, in the order of the layers that were given to the constructor.
        """
        hidden: list[torch.Tensor] = []
        self._is_recording = True
        try:
            yield hidden
            hidden += [self._hidden[layer] for layer in self._layers]
        finally:
            self._is_recording = False
            self._hidden.clear()  # a CUDA graph's memory must not be referenced

    def _after(self, layer: int, _module: nn.Module, _given: Any, output: Any) -> None:
        if self._is_recording:
            self._hidden[layer] = output if isinstance(output, torch.Tensor) else output[0]

    def _before_all(self, _module: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> None:
        if self._is_recording:
            self._hidden[0] = given[0] if given else named["hidden_states"]


def decoder_layers(model: PreTrainedModel) -> tuple[nn.Module, nn.ModuleList]:
    """Return a model's decoder and the list of the decoder's layers; raises ModelError if they are not found."""
    count = model.config.get_text_config().num_hidden_layers
    for decoder in (model.get_decoder(), *model.modules()):
        lists = [each for each in decoder.children() if isinstance(each, nn.ModuleList) and len(each) == count]
        if len(lists) == 1:
            return decoder, lists[0]
    raise ModelError(_error_message(model, f"the list of its {count} layers was not found"))


@torch.inference_mode()
def check_hidden_states(model: PreTrainedModel, layers: Sequence[int]) -> None:
    """Raise ModelError unless `HiddenStateTap` collects the same hidden states as the model itself returns.

    A draft head would get wrong input from a model that changes a layer's output before the next layer reads it. Runs
    one forward pass over 13 tokens.
    """
    tap = HiddenStateTap(model, layers)
    read: list[torch.Tensor] = []
    hook = model.get_output_embeddings().register_forward_pre_hook(lambda _module, given: read.append(given[0]))
    ids = torch.from_numpy(probe_texts(model)[:1]).to(model.device)
    if model.config._attn_implementation == ATTENTION_NAME:  # another target already runs this model
        model.set_attn_implementation("eager")
    try:
        with tap.recording() as hidden:
            states = model(input_ids=ids, use_cache=False, output_hidden_states=True).hidden_states
    except Exception as failure:
        raise ModelError(_error_message(model, first_line(failure))) from failure
    finally:
        hook.remove()
        tap.remove()
    for layer, found in zip(layers, hidden, strict=True):
        if found.ndim != 3:
            raise ModelError(_error_message(model, f"its hidden states have {found.ndim} dimensions, not 3"))
        # The last hidden state that a model returns has passed the final norm.
        expected = read[0] if layer == FINAL else states[layer] if layer < len(states) - 1 else None
        if expected is not None and not agrees(found, expected, _MAX_ERROR):
            where = "the output layer" if layer == FINAL else "the next layer"
            raise ModelError(_error_message(model, f"the output of its layers is changed before {where} reads it"))


def _error_message(model: PreTrainedModel, reason: str) -> str:
    return f"a draft head cannot read the hidden states of {type(model).__name__}: {reason}. Omit the draft head"
