"""Decoder layers on a GPU that call their parts directly: ten kernel launches per layer, without transformers' code.

The norm that reads a residual sum next also computes the sum. One kernel rotates queries and keys, and writes keys and
values to the cache. Import this module only if triton is installed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
import triton
import triton.language as tl
from torch import nn

from ssd.model.cpu.cpu_decoder import FlatLayer, find_llama_layers
from ssd.model.kv.attention import compute_attention
from ssd.model.kv.kv_cache import Pair, SlotRows
from ssd.model.layers.replace import Replaced, swap_forward
from ssd.model.triton.triton_launch import early_launch_options, wait_for_previous_kernel
from ssd.model.triton.triton_layers import BLOCK_HEADS, TritonNorm, rotate_heads, silu_times
from ssd.model.triton.triton_linear import Product


def flatten_by_triton(model: nn.Module) -> Iterator[Replaced]:
    """Replace the ``forward`` of Llama-style decoder layers by that of `DeviceLayer`, which saves Python overhead.

    Call this after all other replacements, because only decoder layers whose parts are already SSD's are replaced.
    Yields for each decoder layer a `Replaced` record, which can restore it.
    """
    layers = find_llama_layers(model)
    norms = [layer.input_layernorm for layer in layers[1:]]
    norms += [getattr(module, "norm", None) for module in model.modules() if hasattr(module, "layers")][:1]
    for layer, following in zip(layers, norms, strict=False):
        flat = DeviceLayer(layer, following)
        if flat.is_usable():
            yield swap_forward(layer, flat.forward)


class DeviceLayer(FlatLayer):
    """A Llama-style decoder layer on a GPU that is computed by SSD's kernels, without transformers' code.

    ``following`` is the norm that is applied next to the layer's output; one kernel launch computes it together with
    the layer's last residual sum.
    """

    def __init__(self, layer: Any, following: nn.Module | None) -> None:
        super().__init__(layer, TritonNorm)
        self._following = following if type(following) is TritonNorm else None
        self._is_known &= "forward" in vars(self._network)  # whose replacement calls `silu_times`
        self._is_known &= self._output_norms is None  # `compute` has no norms of outputs

    def is_usable(self) -> bool:
        attention, network = self._attention._modules, self._network._modules
        return self._is_known and all(
            _product_of(first) is not None and all(_product_of(each) is _product_of(first) for each in others)
            for first, *others in (
                [attention[name] for name in ("q_proj", "k_proj", "v_proj")],
                [attention["o_proj"]],
                [network[name] for name in ("gate_proj", "up_proj")],
                [network["down_proj"]],
            )
        )

    def compute(
        self, hidden_states: torch.Tensor, angles: Pair, stored: Pair, rows: SlotRows, num_outputs: int
    ) -> torch.Tensor:
        norm, inner_norm = self._norms
        attention, network = self._attention._modules, self._network._modules
        heads, gates = attention["q_proj"].product, network["gate_proj"].product
        read = torch.split_with_sizes(heads.compute(norm(hidden_states)), heads.sizes, -1)
        query = self._store(read, angles, stored, rows)
        if num_outputs == 0:
            return hidden_states[:, :0]
        batch, _, width, _ = query.shape
        attended = compute_attention(query, stored, rows, self.rules(rows)).view(batch, width, -1)
        hidden_states = inner_norm.added(hidden_states, attention["o_proj"].product.compute(attended))
        gate, up = torch.split_with_sizes(gates.compute(inner_norm(hidden_states)), gates.sizes, -1)
        more = network["down_proj"].product.compute(silu_times(gate, up))
        return hidden_states + more if self._following is None else self._following.added(hidden_states, more)

    def _store(self, read: Iterable[torch.Tensor], angles: Pair, stored: Pair, rows: SlotRows) -> torch.Tensor:
        """Write keys and values to the KV cache, and return the queries with rotary positions, [B, heads, T, dim].

        ``read`` are the queries, keys and values, [B, T, heads * dim].
        """
        batch, width = angles[0].shape[:2]
        query, key, value = (each.view(batch, width, -1, self._dim) for each in read)
        if self._head_norms:
            query, key = (norm(each) for norm, each in zip(self._head_norms, (query, key), strict=True))
        rotate_and_store_by_triton(query, key, value, angles, stored, rows)
        return query.transpose(1, 2)


def _product_of(module: Any) -> Product | None:
    return vars(module).get("product") if type(module) is nn.Linear else None


def rotate_and_store_by_triton(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, angles: Pair, stored: Pair, rows: SlotRows
) -> None:
    """Apply rotary embeddings to queries and keys, and write the keys and values to the KV cache, in one Triton launch.

    The queries, [B, T, heads, dim], are changed in place; keys and values are [B, T, key heads, dim]. The last axes are
    contiguous. ``angles`` are cosines and sines, [B, T, dim]. ``stored`` are the keys and values that
    `SlotKVCache.store` returned.
    """
    (batch, width, query_heads, dim), key_heads = query.shape, key.shape[2]
    (cos, sin), (keys, values) = angles, stored
    assert cos.shape == sin.shape == (batch, width, dim) and cos.is_contiguous() and sin.is_contiguous()
    assert cos.dtype == query.dtype == keys.dtype and keys.stride(3) == values.stride(3) == 1
    blocks = [triton.cdiv(heads, BLOCK_HEADS) for heads in (query_heads, key_heads)]
    with torch.cuda.device_of(query):  # type: ignore[no-untyped-call]
        _rotate_and_store[(batch * width, blocks[0] + 2 * blocks[1])](
            query,
            key,
            value,
            cos,
            sin,
            keys,
            values,
            rows.slots,
            rows.places.contiguous(),
            width,
            *query.stride()[:3],
            *key.stride()[:3],
            *value.stride()[:3],
            *keys.stride()[:3],
            *values.stride()[:3],
            QUERY_HEADS=query_heads,
            KEY_HEADS=key_heads,
            QUERY_BLOCKS=blocks[0],
            KEY_BLOCKS=blocks[1],
            HALF=dim // 2,
            BLOCK_HEADS=BLOCK_HEADS,
            BLOCK_HALF=triton.next_power_of_2(dim // 2),
            num_warps=2,
            enable_fp_fusion=False,
            **early_launch_options(query.device),
        )


@triton.jit(do_not_specialize=["width"], do_not_specialize_on_alignment=["slots", "places"])
def _rotate_and_store(  # type: ignore[no-untyped-def]
    query,
    key,
    value,
    cos,
    sin,
    keys,
    values,
    slots,
    places,
    width,
    query_row,
    query_position,
    query_head,
    key_row,
    key_position,
    key_head,
    value_row,
    value_position,
    value_head,
    keys_slot,
    keys_head,
    keys_place,
    values_slot,
    values_head,
    values_place,
    QUERY_HEADS: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    QUERY_BLOCKS: tl.constexpr,
    KEY_BLOCKS: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    IS_EARLY: tl.constexpr,
):
    """Apply rotary embeddings to a block of heads of one new token, or write its keys or values to the KV cache.

    The grid is (B * T, blocks of query heads + blocks of key heads + blocks of value heads).
    """
    wait_for_previous_kernel(IS_EARLY)
    position, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row, at = position // width, position % width
    cos += position * 2 * HALF
    sin += position * 2 * HALF
    if block < QUERY_BLOCKS:
        query += row * query_row + at * query_position
        rotate_heads(query, query_head, query, query_head, cos, sin, block, QUERY_HEADS, HALF, BLOCK_HEADS, BLOCK_HALF)
    else:
        slot, place = tl.load(slots + row), tl.load(places + position)
        if block < QUERY_BLOCKS + KEY_BLOCKS:
            rotate_heads(
                key + row * key_row + at * key_position,
                key_head,
                keys + slot * keys_slot + place * keys_place,
                keys_head,
                cos,
                sin,
                block - QUERY_BLOCKS,
                KEY_HEADS,
                HALF,
                BLOCK_HEADS,
                BLOCK_HALF,
            )
        else:
            first = (block - QUERY_BLOCKS - KEY_BLOCKS) * BLOCK_HEADS
            head, dims = (first + tl.arange(0, BLOCK_HEADS))[:, None], tl.arange(0, 2 * BLOCK_HALF)[None, :]
            inside = (head < KEY_HEADS) & (dims < 2 * HALF)
            some = tl.load(value + row * value_row + at * value_position + head * value_head + dims, mask=inside)
            values += slot * values_slot + place * values_place
            tl.store(values + head * values_head + dims, some, mask=inside)
