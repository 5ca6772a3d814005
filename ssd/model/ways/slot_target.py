"""Drive models with attention in one batched pass over the slot KV cache."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import PreTrainedModel

from ssd.jit.addresses import Int64s
from ssd.model.kv.attention import ATTENTION_NAME
from ssd.model.kv.kv_cache import SlotKVCache, SlotRows
from ssd.model.kv.tree import TreeShape
from ssd.model.layers.adapted_linear import Rows
from ssd.model.layers.decoder_layers import FlatModel, is_flat
from ssd.model.layers.tap import Tap, Tapped
from ssd.model.sampling.sampler import Noise, PassOutput
from ssd.model.steps.static_steps import StaticSteps
from ssd.model.target import Integers, Target, TokenMatrix


class SlotTarget(Target):
    """Models that hand our attention function its arguments: one batched pass over the slot KV cache."""

    way = "slot attention"

    def __init__(self, model: PreTrainedModel, num_slots: int, max_length: int, max_width: int) -> None:
        """``max_width`` : most positions of one pass whose rows differ in length; padding may be written that far."""
        super().__init__(model, num_slots, max_length)
        model.set_attn_implementation(ATTENTION_NAME)
        self.max_width = max_width
        self.kv_cache = SlotKVCache(num_slots, max_length + max_width, self.device)
        self.steps: StaticSteps | None = None
        """Where passes that score tokens are repeated rather than launched anew."""
        self.renew_steps: Callable[[], None] = lambda: None
        """To be called after what the model computes with has changed."""
        self._held = self.kv_cache.lengths
        self._computing: Callable[[], AbstractContextManager[None]] = nullcontext
        """What the model computes in."""
        self._had_trees = False
        self._flat = FlatModel(model) if is_flat(model) else None
        self._adapted: Rows | None = None
        self._tapped: Tapped | None = None
        self._tap: Tap | None = None
        """What hears the hidden states of a model that is not flat."""

    def keep_features(self, tapped: Tapped) -> None:
        """From now on every pass stores features beside keys and values; before any. Raises ModelError."""
        self._tapped = tapped
        self._tap = Tap(self.model, tapped.layers) if self._flat is None else None
        self.kv_cache.keep_features(tapped.size, self.dtype)
        self.features = self.kv_cache.features

    def take_adapters(self, names: Iterable[str], rows: Rows) -> None:
        """Slots may have adapters from now on. ``rows`` : where the model's layers look up which row has which."""
        self.adapter_names, self._adapted = frozenset(names), rows
        self._flat = None if self._flat is None else FlatModel(self.model)  # whose output layer may be another

    def use_own_kernels(self, wanted: bool) -> None:
        """Compute linear layers and attention by kernels of ours from now on, or with what was there.

        Their rows have the same bits in any pass, of chains: no trees. Libraries choose the order of their sums by the
        shape of a pass. Recorded passes are recorded anew. Raises ImportError where triton is missing.
        """
        if wanted == (self.kv_cache.kernel is not None):
            return
        from ssd.model.kv.triton_attention import exact_triton_attention
        from ssd.model.layers.triton_linear import own_linears, products_of, sums_whole

        if wanted:
            self.kv_cache.kernel = exact_triton_attention
            list(own_linears(self.model))
            self._had_trees, self.can_verify_trees = self.can_verify_trees, False
        else:
            self.kv_cache.kernel, self.can_verify_trees = None, self._had_trees
        for product in products_of(self.model):
            product.be_exact(wanted)
        self._computing = sums_whole if wanted and self.device.type == "cuda" else nullcontext
        self.renew_steps()

    def rollback(self, slot: int, length: int) -> None:
        """Lower the slot's length; what lies beyond is overwritten later."""
        assert 0 <= length <= self.kv_cache.lengths[slot]
        self.kv_cache.lengths[slot] = length

    def keep(self, slots: Integers, lengths: Integers) -> None:
        """Lower the slots' lengths where they are greater."""
        self.kv_cache.lengths[slots] = np.minimum(self.kv_cache.lengths[slots], lengths)

    @property
    def takes_noise(self) -> bool:
        """Whether passes choose tokens with noise."""
        return self.steps is not None and self.steps.takes_noise

    def can_follow(self, slots: Integers) -> bool:
        """Where passes are recorded, and this one is."""
        return self.steps is not None and self._tapped is None and self.steps.can_follow(np.asarray(slots, np.int64))

    @torch.inference_mode()
    def follow(self, slots: Integers, noise: Noise | None = None) -> PassOutput:
        """As `Target.follow`."""
        assert self.steps is not None
        rows = np.asarray(slots, np.int64)
        output = self.steps.follow(rows, noise)
        self._held[rows] += 1
        return output

    @torch.inference_mode()
    def keep_paths(self, slots: Integers, counts: Integers, paths: Sequence[npt.NDArray[np.int64]]) -> None:
        """Move keys and values of the paths together, those that are not in place yet, and lower the lengths."""
        moves: list[npt.NDArray[np.int64]] = []
        for slot, count, path in zip(slots, counts, paths, strict=True):
            start = self.kv_cache.lengths[slot] - count
            self.kv_cache.lengths[slot] = start + len(path)
            self._fed[slot, start : start + len(path)] = self._fed[slot, start + path]
            to = np.flatnonzero(path != np.arange(len(path)))
            if len(to):
                moves.append(np.stack([np.full(len(to), slot), start + path[to], start + to]))
        if moves:
            together = torch.from_numpy(np.concatenate(moves, axis=1))
            if self.steps is None or not self.steps.moves.run(together):
                self.kv_cache.move(together.to(self.device))

    def _copy(self, source: int, slot: int, start: int, end: int) -> None:
        self.kv_cache.copy(source, slot, start, end)

    def _append(
        self,
        slots: Int64s,
        tokens: TokenMatrix,
        counts: Int64s,
        trees: TreeShape | None = None,
        noise: Noise | None = None,
        **kwargs: Any,
    ) -> PassOutput:
        assert self.steps is None or self._adapted is None  # what is recorded knows of no adapters
        output = None if self.steps is None or kwargs else self.steps.run(slots, tokens, trees, noise)
        if output is None:
            rows = SlotRows.build(self.kv_cache, slots.tolist(), tokens.shape[1], self.device, trees)
            with self._adapting(slots):
                output = PassOutput(self.score(torch.from_numpy(tokens).to(self.device), rows, **kwargs))
        return output

    def _adapting(self, slots: Int64s) -> AbstractContextManager[None]:
        if self._adapted is None:
            return nullcontext()
        return self._adapted.are([self.adapters[slot] for slot in slots], self.device)

    def score(self, tokens: torch.Tensor, rows: SlotRows, **kwargs: Any) -> torch.Tensor:
        """The model over new tokens, int64[B, T], of rows: logits [B, T or fewer, V]. Lengths stay as they are."""
        tapped, hidden = self._tapped, list[torch.Tensor]()
        # Padding may point past the model's last position, where learned position embeddings have no row.
        positions = rows.positions.clamp_max(self.max_length - 1)
        with self._computing():
            if self._flat is not None:
                layers = () if tapped is None else tapped.layers
                logits = self._flat.logits(tokens, positions, rows, layers=layers, hidden=hidden, **kwargs)
            else:
                with nullcontext(hidden) if self._tap is None else self._tap.listening() as hidden:
                    named = {"input_ids": tokens, "position_ids": positions, "slot_rows": rows, **kwargs}
                    logits = self.model(use_cache=False, **named).logits
        if tapped is not None:
            assert self.features is not None
            rows.put(tapped.combine(hidden)[:, None], self.features)
        return logits

    def warm_up(self) -> None:
        """Record the passes that are made most."""
        super().warm_up()
        if self.steps is not None:
            self.steps.warm_up(with_trees=self.can_verify_trees)
