"""Decoder layers and models on a CPU that call their parts directly, without transformers' code in between.

In a pass of few positions of a small model, most of the time is spent in transformers' code: modules that call modules,
views of views, attribute look-ups. Both this code and transformers' call the same faster layers, so their results are
bit-identical.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, Final

import torch
from torch import nn

from ssd.jit.addresses import float32_array, inlined, int64_array, kernel, uint16_array
from ssd.model.cpu.cpu_attention import cpu_attention
from ssd.model.cpu.cpu_layers import NO_NORM, Activation, FusedNorm, add_residual, normalise, rotate_rows
from ssd.model.cpu.packed_linear import PackedMember
from ssd.model.cpu.parallel import factors_of, next_task, numbers_of, run_parallel
from ssd.model.cpu.simd import KINDS
from ssd.model.kv.kv_cache import AttentionRules, Pair, SlotRows
from ssd.model.layers.hidden_states import FINAL
from ssd.model.layers.replace import Replaced, has_hooks, swap_forward

_KINDS: Final = "Gemma", "Gemma2", "Gemma3", "Llama", "Mistral", "Qwen2", "Qwen3"
_LAYER_CLASSES: Final = frozenset(f"{kind}DecoderLayer" for kind in _KINDS)
# The model classes of transformers whose decoder layers compute the formula of `FlatLayer`.
_MODEL_CLASSES: Final = frozenset(f"{kind}ForCausalLM" for kind in _KINDS)


def flatten_layers(model: nn.Module) -> Iterator[Replaced]:
    """Replace the ``forward`` of Llama-style decoder layers by that of `CpuLayer`, which saves Python overhead.

    Call this after all other replacements, because only decoder layers whose linear layers, norms and activation are
    already SSD's modules are replaced. Yields for each decoder layer a `Replaced` record, which can restore it.
    """
    for module in find_llama_layers(model):
        flat = CpuLayer(module)
        if flat.is_usable():
            yield swap_forward(module, flat.forward)


def find_llama_layers(model: nn.Module) -> list[Any]:
    """Return the decoder layers of a model that are Llama-style and still have transformers' ``forward``."""
    return [
        module
        for module in model.modules()
        if type(module).__name__ in _LAYER_CLASSES
        and type(module).__module__.startswith("transformers.models.")
        and "forward" not in vars(module)
    ]


class FlatLayer(ABC):
    """A Llama-style decoder layer that is computed without transformers' code, which saves Python overhead.

    The attention and the gated feed-forward network each have a residual connection and a norm of their input, in Gemma
    2 and 3 also a norm of their output. ``norm`` is SSD's class of RMS norms; layers with other norms cannot be
    computed.
    """

    def __init__(self, layer: Any, norm: type[nn.Module]) -> None:
        self._plain = type(layer).forward
        first, second, parts = layer.input_layernorm, layer.post_attention_layernorm, layer._modules
        self._norms: tuple[Any, Any] = first, parts.get("pre_feedforward_layernorm", second)
        self._output_norms = (second, layer.post_feedforward_layernorm) if self._norms[1] is not second else None
        self._attention, self._network = layer.self_attn, layer.mlp
        self._index: int = self._attention.layer_idx
        self._dim: int = self._attention.head_dim
        is_capped = type(layer).__name__ == "Gemma2DecoderLayer"  # Gemma 3 has the attribute, but does not use it
        self._softcap: float | None = self._attention.attn_logit_softcapping if is_capped else None
        norms = [self._attention._modules.get(name) for name in ("q_norm", "k_norm")]
        self._head_norms: list[Any] = [each for each in norms if type(each) is norm]
        self._is_known = (
            all(type(each) is norm for each in (*self._norms, *(self._output_norms or ())))
            and (self._head_norms == norms or norms == [None, None])
            and "forward" in vars(self._attention)  # whose replacement rotates positions as `_rotate_and_store` does
            and not has_hooks(self._attention)
            and not has_hooks(self._network)
        )

    @abstractmethod
    def is_usable(self) -> bool:
        """Return whether SSD has code for all modules in the decoder layer.

        This can change when a LoRA adapter replaces modules.
        """

    def can_compute(self, hidden_states: torch.Tensor, rows: SlotRows) -> bool:
        """Return whether SSD can compute this forward pass of the layer; if not, transformers' code computes it."""
        return True

    @abstractmethod
    def compute(
        self, hidden_states: torch.Tensor, angles: Pair, stored: Pair, rows: SlotRows, num_outputs: int
    ) -> torch.Tensor:
        """Return the decoder layer's output for ``hidden_states``; both are [B, T, hidden size].

        ``angles`` are the cosines and sines of the rotary position embeddings, [B, T, dim]. ``stored`` are the layer's
        keys and values in all slots of the KV cache, to which those of all T tokens are written. Only the outputs of
        the last ``num_outputs`` tokens are needed, so the layer may leave out others at the front of axis 1.
        """

    def forward(self, layer: nn.Module, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Return the decoder layer's output; transformers' code computes it if SSD cannot.

        It is [B, T, hidden size], or shorter if the argument ``num_outputs`` is given: see `compute`.
        """
        rows: SlotRows | None = kwargs.get("slot_rows")
        num_outputs = kwargs.pop("num_outputs", hidden_states.shape[1])
        stored = None if rows is None else rows.kv_cache.layer_cache(self._index)
        if (
            rows is None
            or stored is None
            or args
            or kwargs.get("attention_mask") is not None
            or not self.can_compute(hidden_states, rows)
            or not self.is_usable()
        ):
            found: torch.Tensor = self._plain(layer, hidden_states, *args, **kwargs)
            return found
        return self.compute(hidden_states, kwargs["position_embeddings"], stored, rows, num_outputs)

    def rules(self, rows: SlotRows) -> AttentionRules:
        return AttentionRules(self._attention.scaling, rows.kv_cache.reach[self._index], None, self._softcap, None)


class FlatModel:
    """Computes the logits of a model whose decoder layers are all `FlatLayer`s, without transformers' code.

    Create it only for a model for which `is_flat` returns True.
    """

    def __init__(self, model: Any) -> None:
        self._inner, self._output = model.model, model.lm_head
        self._softcap: float | None = getattr(model.config, "final_logit_softcapping", None)
        # The arguments that select the rotary positions of each layer: Gemma 3 has two kinds of positions.
        has_kinds = hasattr(self._inner.rotary_emb, "layer_types")
        self._kinds = [(kind,) for kind in model.config.layer_types] if has_kinds else [()] * len(self._inner.layers)

    def logits(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        rows: SlotRows,
        *,
        num_logits: int | None = None,
        layers: Sequence[int] = (),
        hidden: list[torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """Compute the model's logits [B, n, V] for new tokens at ``positions``, both int64[B, T].

        Only the last n = ``num_logits`` tokens of each row get logits (default: all). With 0, the result is empty: keys
        and values are stored, but what only logits depend on is not computed. If the list ``hidden`` is given, the
        hidden states of ``layers``, numbered as in `FeatureSpec`, are appended to it.
        """
        inner, seen = self._inner, dict[int, torch.Tensor]()
        hidden_states = inner.embed_tokens(tokens)
        angles = {kind: inner.rotary_emb(hidden_states, positions, *kind) for kind in set(self._kinds)}
        count = len(inner.layers)
        needs_all = num_logits is None or FINAL in layers or count in layers
        for number, (layer, kind) in enumerate(zip(inner.layers, self._kinds, strict=True)):
            if number in layers:
                seen[number] = hidden_states
            options = {} if needs_all or number < count - 1 else {"num_outputs": num_logits}
            hidden_states = layer.forward(hidden_states, position_embeddings=angles[kind], slot_rows=rows, **options)
        if needs_all or num_logits:
            seen[count], seen[FINAL] = hidden_states, inner.norm(hidden_states)
        if hidden is not None:
            hidden += [seen[number] for number in layers]
        if num_logits == 0:
            return torch.empty(0)
        found: torch.Tensor = self._output(seen[FINAL][:, -(num_logits or tokens.shape[1]) :])
        return found if self._softcap is None else torch.tanh(found / self._softcap) * self._softcap


def is_flat(model: Any) -> bool:
    """Return whether `FlatModel` can compute a model: all its layers are `FlatLayer`s without forward hooks."""
    if type(model).__name__ not in _MODEL_CLASSES or not type(model).__module__.startswith("transformers.models."):
        return False
    inner = model.model
    forwards = [getattr(layer.forward, "__func__", None) for layer in inner.layers]
    parts = model, inner, inner.embed_tokens, inner.rotary_emb, *inner.layers, inner.norm, model.lm_head
    return all(isinstance(getattr(each, "__self__", None), FlatLayer) for each in forwards) and not any(
        has_hooks(part) for part in parts
    )


class CpuLayer(FlatLayer):
    """A Llama-style decoder layer on a CPU that computes small forward passes without transformers' code.

    The results are bit-identical to those of transformers' code with the same linear layers, norms and activation.
    """

    def __init__(self, layer: Any) -> None:
        super().__init__(layer, FusedNorm)
        norms = (*self._norms, *(self._output_norms or ()), *self._head_norms)
        self._dtypes = {norm.weight.dtype for norm in norms}

    def is_usable(self) -> bool:
        attention, network = self._attention._modules, self._network._modules
        return (
            self._is_known
            and type(attention["q_proj"]) is type(attention["k_proj"]) is type(attention["v_proj"]) is PackedMember
            and type(network["gate_proj"]) is type(network["up_proj"]) is PackedMember
            and type(network["act_fn"]) is Activation
        )

    def can_compute(self, hidden_states: torch.Tensor, rows: SlotRows) -> bool:
        """Return whether the pass has the norms' dtype and its attention kernel is `cpu_attention`."""
        return rows.kernel is None and rows.kv_cache.kernel is None and self._dtypes == {hidden_states.dtype}

    def compute(
        self, hidden_states: torch.Tensor, angles: Pair, stored: Pair, rows: SlotRows, num_outputs: int
    ) -> torch.Tensor:
        attention, network = self._attention._modules, self._network._modules
        read = attention["q_proj"].group.product(self._norms[0](hidden_states))
        query = self._store(read, angles, stored, rows)
        if num_outputs == 0:
            return hidden_states[:, :0]
        if num_outputs < hidden_states.shape[1]:
            hidden_states = hidden_states[:, -num_outputs:].contiguous()
            query, rows = query[:, :, -num_outputs:], rows.last(num_outputs)
        added: torch.Tensor = attention["o_proj"](self._attend(query, stored, rows))
        output_norms = self._output_norms or (None, None)
        hidden_states, normed = add_residual(hidden_states, added, output_norms[0], self._norms[1])
        group = network["gate_proj"].group
        gate, up = group.product(normed).split_with_sizes(group.sizes, -1)
        added = network["down_proj"](network["act_fn"].gate(gate, up))
        return add_residual(hidden_states, added, output_norms[1], None)[0]

    def _attend(self, query: torch.Tensor, stored: Pair, rows: SlotRows) -> torch.Tensor:
        batch, heads, width, _ = query.shape
        return cpu_attention(query, *stored, rows, self.rules(rows)).view(batch, width, heads * self._dim)

    def _store(self, read: torch.Tensor, angles: Pair, stored: Pair, rows: SlotRows) -> torch.Tensor:
        """Write keys and values to the KV cache, and return the queries with rotary positions, [B, heads, T, dim].

        ``read`` is the joint output of q_, k_ and v_proj, [B, T, heads * dim]; it is changed in place.
        """
        (cos, sin), (keys, values) = angles, stored
        batch, width, size = read.shape
        num_heads, kv_heads = size // self._dim - 2 * keys.shape[1], keys.shape[1]
        assert cos.shape == sin.shape == (batch, width, self._dim) and cos.is_contiguous() and sin.is_contiguous()
        norms = [norm.row_rule for norm in self._head_norms] or [NO_NORM] * 2
        arrays = read.data_ptr(), cos.data_ptr(), sin.data_ptr(), rows.slots.data_ptr(), rows.places.data_ptr()
        sizes = batch, width, num_heads, kv_heads, self._dim
        key_array = keys.data_ptr(), keys.stride(0), keys.stride(1), keys.stride(3)
        value_array = values.data_ptr(), values.stride(0), values.stride(1), values.stride(2)
        (query_weight, query_rounds, query_eps), (key_weight, key_rounds, key_eps) = norms
        weights = query_weight, query_rounds, key_weight, key_rounds
        numbers = KINDS[str(read.dtype)], *arrays, *sizes, *weights, *key_array, *value_array
        run_parallel(
            _rotate_and_store, numbers, batch * width, _PLACE_WORK * read.numel(), factors=(query_eps, key_eps)
        )
        return read.view(batch, width, -1, self._dim)[:, :, :num_heads].transpose(1, 2)


_PLACE_WORK: Final = 48  # the cost of rotating or storing one number, in multiplications
_NUMBERS: Final = 23  # the number of integer arguments of `_rotate_and_store`


@kernel
def _rotate_and_store(call: int) -> None:  # pragma: no cover - compiled
    """Apply norms and rotary positions to queries and keys in place, and write keys and values to the KV cache.

    A task is one position of a row, see `run_parallel`. Arrays are given by their addresses; strides are in array
    elements, not in bytes.
    """
    numbers, factors = numbers_of(call, _NUMBERS), factors_of(call, _NUMBERS, 2)
    kind, read, cos, sin, slots, places = numbers[0], numbers[1], numbers[2], numbers[3], numbers[4], numbers[5]
    batch, width, num_heads, kv_heads, dim = numbers[6], numbers[7], numbers[8], numbers[9], numbers[10]
    query_weight, query_rounds, query_eps = numbers[11], numbers[12] != 0, factors[0]
    key_weight, key_rounds, key_eps = numbers[13], numbers[14] != 0, factors[1]
    keys, key_slot, key_head, key_number = numbers[15], numbers[16], numbers[17], numbers[18]
    values, value_slot, value_head, value_place = numbers[19], numbers[20], numbers[21], numbers[22]
    size = 2 if kind else 4
    rotated_heads, heads = num_heads + kv_heads, num_heads + 2 * kv_heads
    slot_of, place_of = int64_array(slots, batch), int64_array(places, batch * width)
    position = next_task(call, -1)
    while position >= 0:
        angle = position * dim * size
        given = read + position * heads * dim * size
        first_key = given + num_heads * dim * size
        if query_weight:
            normalise(kind, query_rounds, given, query_weight, given, num_heads, dim, query_eps)
        if key_weight:
            normalise(kind, key_rounds, first_key, key_weight, first_key, kv_heads, dim, key_eps)
        rotate_rows(kind, (given, 0, dim * size, 0), (1, rotated_heads, 1, dim), cos + angle, sin + angle, given)
        slot, place = slot_of[position // width], place_of[position]
        for head in range(kv_heads):
            key = first_key + head * dim * size
            value = key + kv_heads * dim * size
            _copy(size, key, keys + (slot * key_slot + head * key_head + place) * size, key_number, dim)
            _copy(size, value, values + (slot * value_slot + head * value_head + place * value_place) * size, 1, dim)
        position = next_task(call, position)


@inlined
def _copy(size: int, source: int, target: int, stride: int, count: int) -> None:
    end = (count - 1) * stride + 1
    if size == 4:
        wide, wide_target = float32_array(source, count), float32_array(target, end)
        for i in range(count):
            wide_target[i * stride] = wide[i]
    else:
        narrow, narrow_target = uint16_array(source, count), uint16_array(target, end)
        for i in range(count):
            narrow_target[i * stride] = narrow[i]
