"""Ways to attend from a few new positions to a KV cache with a length for each row.

A candidate is prepared for a problem outside the timing (masks, plans, its own layout of the cache, compilation) and
raises where it does not run here.
"""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention

from ssd.model.kv.kv_cache import SlotKVCache, SlotRows

Attend = Callable[[], torch.Tensor]
"""One layer's attention: [B, T, H, D]."""

_PAGE = 16
_WORKSPACE_BYTES = 128 << 20


class NotHereError(RuntimeError):
    """The candidate needs something that this machine does not have."""


@dataclass(frozen=True, slots=True, eq=False)
class Problem:
    """Queries over a filled cache whose newest ``T`` positions are the queries' own.

    ``query`` : [B, H, T, D], as a model's layer hands it over. ``keys``, ``values`` : [B, Hkv, L, D]. ``rows`` : the
    slots in an order that is not theirs. ``lengths`` : int64[B], positions before the new ones, of rows in their order.
    """

    query: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    rows: SlotRows
    lengths: torch.Tensor
    scale: float

    @classmethod
    def random(
        cls, batch: int, width: int, context: int, heads: tuple[int, int, int], dtype: torch.dtype, device: torch.device
    ) -> Problem:
        """heads : query heads, key heads, head dimension. Contexts of the rows differ: half of ``context`` up to it."""
        num_heads, kv_heads, dim = heads
        generator = torch.Generator().manual_seed(0)

        def numbers(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator).to(device=device, dtype=dtype)

        kv_cache = SlotKVCache(batch, -(-(context + width) // _PAGE) * _PAGE, device)
        lengths = np.linspace(context, max(1, context // 2), batch).astype(np.int64)
        slots = list(range(batch))[::-1]
        kv_cache.lengths[slots] = lengths
        return cls(
            numbers(batch, width, num_heads, dim).transpose(1, 2),
            numbers(batch, kv_heads, kv_cache.max_length, dim),
            numbers(batch, kv_heads, kv_cache.max_length, dim),
            SlotRows.build(kv_cache, slots, width, device),
            torch.from_numpy(lengths).to(device),
            dim**-0.5,
        )

    @property
    def moved_bytes(self) -> int:
        """Keys and values that must be read, queries and output."""
        _, kv_heads, _, dim = self.keys.shape
        num_keys = int(self.lengths.sum()) + self.query.shape[0] * self.query.shape[2]
        return (2 * num_keys * kv_heads * dim + 2 * self.query.numel()) * self.query.element_size()

    def in_order(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values by row, as candidates that know no slots take them."""
        return self.keys.index_select(0, self.rows.slots), self.values.index_select(0, self.rows.slots)


def reference(problem: Problem) -> torch.Tensor:
    """Attention written out in float32: [B, T, H, D]."""
    keys, values = (each.float() for each in problem.in_order())
    groups = problem.query.shape[1] // keys.shape[1]
    keys, values = (each.repeat_interleave(groups, dim=1) for each in (keys, values))
    scores = problem.query.float() @ keys.transpose(-1, -2) * problem.scale
    visible = torch.arange(keys.shape[2], device=keys.device) <= problem.rows.positions[:, None, :, None]
    return (scores.masked_fill(~visible, float("-inf")).softmax(-1) @ values).transpose(1, 2)


def ours(problem: Problem) -> Attend:
    """Our Triton kernel, on the cache in place."""
    _needs_cuda(problem)
    from ssd.model.kv.triton_attention import triton_attention

    none: dict[str, Any] = {"window": None, "chunk": None, "softcap": None, "sinks": None}
    return lambda: triton_attention(
        problem.query, problem.keys, problem.values, problem.rows, scale=problem.scale, **none
    )


def packed_sdpa(problem: Problem) -> Attend:
    """What plain passes do: keys copied by slot, grouped heads in the query axis, a mask of floats."""
    rows = problem.rows

    def attend() -> torch.Tensor:
        keys, values = (
            each[:, :, : rows.num_keys].index_select(0, rows.slots) for each in (problem.keys, problem.values)
        )
        return _packed(problem, keys, values)

    return attend


def packed_sdpa_in_place(problem: Problem) -> Attend:
    """The same where slots are neighbours in order: no copy."""
    keys, values = (each[:, :, : problem.rows.num_keys] for each in problem.in_order())
    return lambda: _packed(problem, keys, values)


def _packed(problem: Problem, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    batch, heads, width, dim = problem.query.shape
    kv_heads = keys.shape[1]
    mask = problem.rows.mask(None, None, heads // kv_heads, problem.query.dtype)  # kept between layers
    query = problem.query.reshape(batch, kv_heads, -1, dim)
    out = scaled_dot_product_attention(query, keys, values, attn_mask=mask, scale=problem.scale)
    return out.reshape(batch, heads, width, dim).transpose(1, 2).contiguous()


def flex(problem: Problem) -> Attend:
    """torch's flex_attention, compiled, with a block mask by length; its own cache in row order."""
    _needs_cuda(problem)
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    keys, values = (each[:, :, : problem.rows.num_keys].contiguous() for each in problem.in_order())
    lengths = problem.lengths

    def is_visible(b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return k <= lengths[b] + q

    batch, _, width, _ = problem.query.shape
    mask = create_block_mask(is_visible, batch, None, width, keys.shape[2], device=keys.device)
    torch.compiler.reset()  # each problem is a new shape: old ones would count against a limit
    compiled: Any = torch.compile(flex_attention, dynamic=False)
    query = problem.query.contiguous()
    return lambda: compiled(query, keys, values, block_mask=mask, scale=problem.scale, enable_gqa=True).transpose(1, 2)


def varlen(problem: Problem) -> Attend:
    """torch's varlen_attn with the length of each row; its own cache [positions, heads, dim] in row order.

    Before torch 2.12 it takes no lengths, and the operation below it does: FlashAttention 2 either way.
    """
    _needs_cuda(problem)
    attend = _imported("torch.nn.attention.varlen", "varlen_attn")
    batch, heads, width, dim = problem.query.shape
    keys, values = (each.transpose(1, 2).flatten(0, 1).contiguous() for each in problem.in_order())
    query = problem.query.transpose(1, 2).reshape(batch * width, heads, dim)
    slot_length = problem.keys.shape[2]
    options: dict[str, Any] = {"device": query.device, "dtype": torch.int32}
    first_query = torch.arange(0, (batch + 1) * width, width, **options)
    first_key = torch.arange(0, (batch + 1) * slot_length, slot_length, **options)
    places = first_query, first_key, width, slot_length
    rules: dict[str, Any] = {"scale": problem.scale, "seqused_k": (problem.lengths + width).to(torch.int32)}
    if "seqused_k" in inspect.signature(attend).parameters:
        rules |= {"window_size": (-1, 0), "enable_gqa": True}
        return lambda: attend(query, keys, values, *places, **rules).view(batch, width, heads, dim)
    below: Any = torch.ops.aten._flash_attention_forward
    return lambda: below(query, keys, values, *places, 0.0, True, False, **rules)[0].view(batch, width, heads, dim)


def flash_attn(problem: Problem) -> Attend:
    """flash-attn's flash_attn_with_kvcache, by slot and length; its own cache [slots, positions, heads, dim]."""
    return _with_kvcache(problem, "flash_attn")


def flash_attn_3(problem: Problem) -> Attend:
    """The same of FlashAttention 3, by its own name or as fa3-fwd packs it."""
    names = ("flash_attn_interface", "fa3_fwd_interface")
    return _with_kvcache(problem, next(filter(importlib.util.find_spec, names), names[0]))


def _with_kvcache(problem: Problem, module: str) -> Attend:
    _needs_cuda(problem)
    attend = _imported(module, "flash_attn_with_kvcache")
    keys, values = (each.transpose(1, 2).contiguous() for each in (problem.keys, problem.values))
    query = problem.query.transpose(1, 2).contiguous()
    used, slots = (problem.lengths + query.shape[1]).to(torch.int32), problem.rows.slots.to(torch.int32)
    rules: dict[str, Any] = {"cache_seqlens": used, "cache_batch_idx": slots, "softmax_scale": problem.scale}
    return lambda: attend(query, keys, values, causal=True, **rules)


def flashinfer(problem: Problem) -> Attend:
    """FlashInfer's paged prefill, planned outside the timing; its own cache of pages of 16 positions."""
    _needs_cuda(problem)
    wrapper_of = _imported("flashinfer", "BatchPrefillWithPagedKVCacheWrapper")
    batch, heads, width, dim = problem.query.shape
    kv_heads, slot_pages = problem.keys.shape[1], problem.keys.shape[2] // _PAGE
    keys, values = (
        each.transpose(1, 2).reshape(batch * slot_pages, _PAGE, kv_heads, dim).contiguous()
        for each in (problem.keys, problem.values)
    )
    used = (problem.lengths + width).tolist()
    pages = [-(-length // _PAGE) for length in used]
    ints: dict[str, Any] = {"device": keys.device, "dtype": torch.int32}
    indices = [slot * slot_pages + page for slot, n in zip(problem.rows.slots.tolist(), pages, strict=True)
               for page in range(n)]  # fmt: skip
    wrapper = wrapper_of(torch.empty(_WORKSPACE_BYTES, dtype=torch.uint8, device=keys.device), "NHD")
    wrapper.plan(
        torch.arange(0, (batch + 1) * width, width, **ints),
        torch.tensor(np.cumsum([0, *pages]).tolist(), **ints),
        torch.tensor(indices, **ints),
        torch.tensor([(length - 1) % _PAGE + 1 for length in used], **ints),
        heads,
        kv_heads,
        dim,
        _PAGE,
        causal=True,
        q_data_type=keys.dtype,
        sm_scale=problem.scale,
    )
    query = problem.query.transpose(1, 2).reshape(batch * width, heads, dim)
    return lambda: wrapper.run(query, (keys, values)).view(batch, width, heads, dim)


CANDIDATES: dict[str, Callable[[Problem], Attend]] = {
    "ours": ours,
    "sdpa, keys copied": packed_sdpa,
    "sdpa, in place": packed_sdpa_in_place,
    "flex_attention": flex,
    "varlen_attn": varlen,
    "flash-attn": flash_attn,
    "FlashAttention 3": flash_attn_3,
    "FlashInfer": flashinfer,
}


def _needs_cuda(problem: Problem) -> None:
    if problem.query.device.type != "cuda":
        raise NotHereError("runs on CUDA only")


def _imported(module: str, name: str) -> Any:
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, OSError, AttributeError) as error:
        raise NotHereError(f"{module} is not installed, or has no {name}") from error
