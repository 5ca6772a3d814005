"""Whole decoder layers on a CPU, called part by part without the library's code between them, and models of such.

In a pass of few positions of a small model, most of the time goes into that code: modules that call modules, views of
views, look-ups of attributes. The parts are those that were put in place of the library's, so that the bits are theirs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, Final

import torch
from torch import nn

from ssd.jit.addresses import float32_array, inlined, int64_array, kernel, uint16_array
from ssd.jit.simd import KINDS
from ssd.model.kv.attention import cpu_attention
from ssd.model.kv.kv_cache import AttentionRules, Pair, SlotRows
from ssd.model.layers.packed_linear import FusedMember
from ssd.model.layers.replace import MOST_NUMBERS, Replaced, has_hooks, swap_forward
from ssd.model.layers.tap import FINAL
from ssd.model.layers.vector_layers import Activation, FusedNorm, normalise, turn_rows

_KINDS: Final = "Llama", "Mistral", "Qwen2", "Qwen3"
_KNOWN: Final = frozenset(f"{kind}DecoderLayer" for kind in _KINDS)
_MODELS: Final = frozenset(f"{kind}ForCausalLM" for kind in _KINDS)
"""Classes of transformers: of these it is known what they compute."""


def flatten_layers(model: nn.Module) -> Iterator[Replaced]:
    """Have decoder layers of known kinds compute by `CpuLayer`; what was replaced, as it goes. After all other layers.

    Of a layer whose parts were left as they are nothing is replaced.
    """
    for module in known_layers(model):
        flat = CpuLayer(module)
        if flat.is_usable():
            yield swap_forward(module, flat.forward)


def known_layers(model: nn.Module) -> list[Any]:
    """Layers of kinds of which it is known what they compute, and that compute it by their own code."""
    return [
        module
        for module in model.modules()
        if type(module).__name__ in _KNOWN
        and type(module).__module__.startswith("transformers.models.")
        and "forward" not in vars(module)
    ]


class FlatLayer(ABC):
    """A layer of Llama's kind: attention and a gated network, each behind a norm and beside the stream."""

    def __init__(self, layer: Any, norm: type[nn.Module]) -> None:
        """``norm`` : the kind that takes the place of the layer's."""
        self._plain = type(layer).forward
        self._norms: tuple[Any, Any] = layer.input_layernorm, layer.post_attention_layernorm
        self._attention, self._network = layer.self_attn, layer.mlp
        self._index: int = self._attention.layer_idx
        self._dim: int = self._attention.head_dim
        norms = [self._attention._modules.get(name) for name in ("q_norm", "k_norm")]
        self._head_norms: list[Any] = [each for each in norms if type(each) is norm]
        self._is_known = (
            type(self._norms[0]) is type(self._norms[1]) is norm
            and (self._head_norms == norms or norms == [None, None])
            and "forward" in vars(self._attention)  # which turns positions as `_place` does
            and not has_hooks(self._attention)
            and not has_hooks(self._network)
        )

    @abstractmethod
    def is_usable(self) -> bool:
        """Whether all parts are ours, now: adapters may stand in their place later."""

    def takes(self, hidden_states: torch.Tensor, rows: SlotRows) -> bool:
        """Whether a pass is made so."""
        return True

    @abstractmethod
    def compute(self, hidden_states: torch.Tensor, angles: Pair, stored: Pair, rows: SlotRows) -> torch.Tensor:
        """What the layer says; ``stored`` is what it holds of all slots, ``angles`` cosines and sines, [B, T, dim]."""

    def forward(self, layer: nn.Module, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """As the library's: of new positions [B, T, hidden size] of slots; by its own code in any other case."""
        rows: SlotRows | None = kwargs.get("slot_rows")
        stored = None if rows is None else rows.kv_cache.written(self._index)
        if (
            rows is None
            or stored is None
            or args
            or kwargs.get("attention_mask") is not None
            or not self.takes(hidden_states, rows)
            or not self.is_usable()
        ):
            found: torch.Tensor = self._plain(layer, hidden_states, *args, **kwargs)
            return found
        return self.compute(hidden_states, kwargs["position_embeddings"], stored, rows)

    def rules(self, rows: SlotRows) -> AttentionRules:
        """Whom a query may see: these kinds have neither chunks nor soft caps nor sinks."""
        return AttentionRules(self._attention.scaling, rows.kv_cache.reach[self._index], None, None, None)


class FlatModel:
    """A model of such layers, without the library's code around them either."""

    def __init__(self, model: Any) -> None:
        """``model`` : one that `is_flat`."""
        self._inner, self._output = model.model, model.lm_head

    def logits(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        rows: SlotRows,
        *,
        logits_to_keep: int = 0,
        layers: Sequence[int] = (),
        hidden: list[torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """Of new tokens, int64[B, T], that stand at ``positions``: [B, T, V]; with ``logits_to_keep`` of so many.

        ``hidden`` : is given the hidden states of ``layers``, numbered as `Tapped` does.
        """
        inner, seen = self._inner, dict[int, torch.Tensor]()
        hidden_states = inner.embed_tokens(tokens)
        angles = inner.rotary_emb(hidden_states, positions)
        for number, layer in enumerate(inner.layers):
            if number in layers:
                seen[number] = hidden_states
            hidden_states = layer.forward(hidden_states, position_embeddings=angles, slot_rows=rows)
        seen[len(inner.layers)], seen[FINAL] = hidden_states, inner.norm(hidden_states)
        if hidden is not None:
            hidden += [seen[number] for number in layers]
        found: torch.Tensor = self._output(seen[FINAL][:, -logits_to_keep:])
        return found


def is_flat(model: Any) -> bool:
    """Whether all layers of a model compute so, and nobody wants to know what passes through it."""
    if type(model).__name__ not in _MODELS or not type(model).__module__.startswith("transformers.models."):
        return False
    inner = model.model
    forwards = [getattr(layer.forward, "__func__", None) for layer in inner.layers]
    parts = model, inner, inner.embed_tokens, inner.rotary_emb, *inner.layers, inner.norm, model.lm_head
    return all(isinstance(getattr(each, "__self__", None), FlatLayer) for each in forwards) and not any(
        has_hooks(part) for part in parts
    )


class CpuLayer(FlatLayer):
    """On a CPU, of few positions; its bits are those of the parts."""

    def __init__(self, layer: Any) -> None:
        super().__init__(layer, FusedNorm)

    def is_usable(self) -> bool:
        """Whether all parts are ours, now: adapters may stand in their place later."""
        attention, network = self._attention._modules, self._network._modules
        return (
            self._is_known
            and type(attention["q_proj"]) is type(attention["k_proj"]) is type(attention["v_proj"]) is FusedMember
            and type(network["gate_proj"]) is type(network["up_proj"]) is FusedMember
            and type(network["act_fn"]) is Activation
        )

    def takes(self, hidden_states: torch.Tensor, rows: SlotRows) -> bool:
        """Not what several cores share, nor with an attention of the pass's own."""
        return rows.kernel is None and rows.kv_cache.kernel is None and hidden_states.numel() <= MOST_NUMBERS

    def compute(self, hidden_states: torch.Tensor, angles: Pair, stored: Pair, rows: SlotRows) -> torch.Tensor:
        """As `FlatLayer.compute`."""
        attention, network = self._attention._modules, self._network._modules
        read = attention["q_proj"].group.product(self._norms[0](hidden_states))
        said = self._attend(read, angles, stored, rows)
        hidden_states = hidden_states + attention["o_proj"](said)
        group = network["gate_proj"].group
        gate, up = group.product(self._norms[1](hidden_states)).split_with_sizes(group.sizes, -1)
        more: torch.Tensor = network["down_proj"](network["act_fn"](gate).mul_(up))
        return hidden_states + more

    def _attend(self, read: torch.Tensor, angles: Pair, stored: Pair, rows: SlotRows) -> torch.Tensor:
        """What queries, keys and values, side by side in [B, T, heads * dim], bring: [B, T, query heads * dim]."""
        (cos, sin), (keys, values) = angles, stored
        batch, width, size = read.shape
        num_heads, kv_heads = size // self._dim - 2 * keys.shape[1], keys.shape[1]
        assert cos.shape == sin.shape == (batch, width, self._dim) and cos.is_contiguous() and sin.is_contiguous()
        query_norm, key_norm = [norm.row_rule for norm in self._head_norms] or [_NO_NORM] * 2
        _place(
            KINDS[str(read.dtype)], read.data_ptr(), cos.data_ptr(), sin.data_ptr(), query_norm, key_norm,
            batch * width, width, num_heads, kv_heads, self._dim, rows.slots.data_ptr(), rows.places.data_ptr(),
            keys.data_ptr(), keys.stride(0), keys.stride(1), keys.stride(3),
            values.data_ptr(), values.stride(0), values.stride(1), values.stride(2),
        )  # fmt: skip
        query = read.view(batch, width, -1, self._dim)[:, :, :num_heads].transpose(1, 2)
        return cpu_attention(query, keys, values, rows, self.rules(rows)).view(batch, width, num_heads * self._dim)


_NO_NORM: Final = (0, False, 0.0)


@kernel
def _place(  # pragma: no cover - compiled
    kind: int, read: int, cos: int, sin: int, query_norm: tuple[int, bool, float], key_norm: tuple[int, bool, float],
    num_positions: int, width: int, num_heads: int, kv_heads: int, dim: int, slots: int, places: int,
    keys: int, key_slot: int, key_head: int, key_number: int,
    values: int, value_slot: int, value_head: int, value_place: int,
) -> None:  # fmt: skip
    """Norm and turn queries and keys in place, and write keys and values where they are kept: strides in numbers."""
    size = 2 if kind else 4
    heads_turned, heads = num_heads + kv_heads, num_heads + 2 * kv_heads
    slot_of, place_of = int64_array(slots, num_positions // width), int64_array(places, num_positions)
    for position in range(num_positions):
        angle = position * dim * size
        given = read + position * heads * dim * size
        weight, rounds_first, eps = query_norm
        if weight:
            normalise(kind, rounds_first, given, weight, given, num_heads, dim, eps, 0, 1)
        first_key = given + num_heads * dim * size
        weight, rounds_first, eps = key_norm
        if weight:
            normalise(kind, rounds_first, first_key, weight, first_key, kv_heads, dim, eps, 0, 1)
        turn_rows(kind, given, 0, dim * size, 0, 1, heads_turned, 1, dim, cos + angle, sin + angle, given)
        slot, place = slot_of[position // width], place_of[position]
        for head in range(kv_heads):
            key = first_key + head * dim * size
            value = key + kv_heads * dim * size
            _copy(size, key, keys + (slot * key_slot + head * key_head + place) * size, key_number, dim)
            _copy(size, value, values + (slot * value_slot + head * value_head + place * value_place) * size, 1, dim)


@inlined
def _copy(size: int, source: int, target: int, stride: int, count: int) -> None:
    """So many numbers of ``size`` bytes, ``stride`` numbers apart where they go."""
    end = (count - 1) * stride + 1
    if size == 4:
        wide, wide_target = float32_array(source, count), float32_array(target, end)
        for i in range(count):
            wide_target[i * stride] = wide[i]
    else:
        narrow, narrow_target = uint16_array(source, count), uint16_array(target, end)
        for i in range(count):
            narrow_target[i * stride] = narrow[i]
