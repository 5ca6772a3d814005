"""The runner for models with attention: one batched forward pass over the slot KV cache."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from transformers import PreTrainedModel

from ssd.jit.addresses import Int64s
from ssd.model.cpu.cpu_decoder import FlatModel, is_flat
from ssd.model.cuda_graphs.graph_runner import CudaGraphRunner
from ssd.model.kv.attention import ATTENTION_NAME
from ssd.model.kv.kv_cache import WRITERS, SlotKVCache, SlotRows
from ssd.model.kv.tree import TreeShape
from ssd.model.layers.hidden_states import FeatureSpec, HiddenStateTap, store_hidden_states
from ssd.model.runners.adapted_linear import AdapterRows
from ssd.model.sampling.sampler import Noise, PassOutput
from ssd.model.target import Integers, Target, TokenMatrix

_MAX_UNSTORED: Final = 32
"""The number of passes after which the hidden states of small passes are stored even if no draft head reads them.

A small pass has at most as many tokens. After a pass, the first calls of Python code take several times as long as
later ones: storing passes of 1 and 8 rows together takes 9 and 31 us per pass, and storing each alone 31 and 52 us.
"""


class SlotRunner(Target):
    """A model runner that computes all sequences in one batched forward pass over the slot KV cache.

    The model's attention function is replaced by SSD's. ``max_width`` is the maximum number of tokens per row in a pass
    whose rows have different lengths. Each slot has ``max_width`` extra positions, to which padding is written. Call
    ``recapture_graphs`` after a change of the model's layers.
    """

    backend = "slot attention"

    def __init__(self, model: PreTrainedModel, num_slots: int, max_length: int, max_width: int) -> None:
        super().__init__(model, num_slots, max_length)
        model.set_attn_implementation(ATTENTION_NAME)
        if self.device.type == "cuda":
            with suppress(ImportError):  # triton comes with CUDA builds of torch
                from ssd.model.triton.triton_write import write_by_triton

                WRITERS["cuda"] = write_by_triton
        self.max_width = max_width
        self.kv_cache = SlotKVCache(num_slots, max_length + max_width, self.device)
        self.graph_runner: CudaGraphRunner | None = None
        self.recapture_graphs: Callable[[], None] = lambda: None
        self._lengths = self.kv_cache.lengths
        # The context manager in which the model's forward pass runs.
        self._compute_context: Callable[[], AbstractContextManager[None]] = nullcontext
        self._could_verify_trees = False
        self._flat = FlatModel(model) if is_flat(model) else None
        if self._flat is not None:
            self._prefill_options = {"num_logits": 0}
        self._delayed: tuple[int, TokenMatrix] | None = None  # the slot and tokens of `delay_prefill`
        self._adapter_rows: AdapterRows | None = None
        self._feature_spec: FeatureSpec | None = None
        # The hidden states of recent small passes, with their slots and first places. Not `SlotRows`, which has masks.
        self._unstored: list[tuple[list[torch.Tensor], torch.Tensor, torch.Tensor]] = []
        # The hooks that read hidden states, unless `FlatModel` computes the model.
        self._tap: HiddenStateTap | None = None

    def allocate_features(self, tapped: FeatureSpec) -> None:
        """Allocate memory in which later forward passes store the hidden states that a draft head reads.

        Raises ModelError if the model has no such hidden states.
        """
        self._feature_spec = tapped
        self._tap = HiddenStateTap(self.model, tapped.layers) if self._flat is None else None
        num_layers = len(tapped.layers) if tapped.combine is None else 1
        self.kv_cache.allocate_features(num_layers, tapped.size // num_layers, self.dtype)

    @property
    def features(self) -> torch.Tensor | None:
        self._compute_delayed()
        self._store_features()
        return self.kv_cache.features

    def enable_adapters(self, names: Iterable[str], rows: AdapterRows) -> None:
        """Allow slots to use the LoRA adapters ``names``.

        Each forward pass writes the adapters of its rows to ``rows``, an object that it shares with the model's layers.
        """
        self.adapter_names, self._adapter_rows = frozenset(names), rows
        self._flat = None if self._flat is None else FlatModel(self.model)  # the output layer may have been replaced

    def use_invariant_kernels(self, wanted: bool) -> None:
        """Switch linear layers and attention between SSD's batch-invariant kernels and the libraries' faster kernels.

        Libraries choose the order of summation by the shape of the pass, so the rounding of a row depends on the other
        rows. SSD's kernels compute bit-identical results for a row in any pass, but only for draft chains: while they
        are in use, draft trees are not verified. CUDA graphs are captured again. Raises ImportError if triton is
        missing.
        """
        if wanted == (self.kv_cache.kernel is not None):
            return
        from ssd.model.triton.triton_attention import exact_triton_attention
        from ssd.model.triton.triton_linear import own_linears, products_of, without_split_sums

        if wanted:
            self.kv_cache.kernel = exact_triton_attention
            list(own_linears(self.model))
            self._could_verify_trees, self.can_verify_trees = self.can_verify_trees, False
        else:
            self.kv_cache.kernel, self.can_verify_trees = None, self._could_verify_trees
        for product in products_of(self.model):
            product.be_exact(wanted)
        self._compute_context = without_split_sums if wanted and self.device.type == "cuda" else nullcontext
        self.recapture_graphs()

    @property
    def can_delay_prefill(self) -> bool:  # type: ignore[override]
        return self._flat is not None and self.device.type == "cpu"

    @property
    def has_delayed_prefill(self) -> bool:  # type: ignore[override]
        return self._delayed is not None

    def delay_prefill(self, slot: int, tokens: npt.NDArray[np.int32]) -> None:
        assert self.can_delay_prefill
        self._compute_delayed()
        row, start = np.ascontiguousarray(tokens, np.int64), self.length(slot)
        self._token_ids[slot, start : start + len(row)] = row
        self._lengths[slot] += len(row)
        self._delayed = slot, row[None]

    def _compute_delayed(self) -> None:
        """Compute the tokens of `delay_prefill` now, because their slot is needed before its next forward pass."""
        if self._delayed is not None:
            slot, tokens = self._pop_delayed()
            self.prefill([slot], tokens, [tokens.shape[1]])

    def _pop_delayed(self) -> tuple[int, TokenMatrix]:
        assert self._delayed is not None
        (slot, tokens), self._delayed = self._delayed, None
        self._lengths[slot] -= tokens.shape[1]
        return slot, tokens

    def rollback(self, slot: int, length: int) -> None:
        self._compute_delayed()
        assert 0 <= length <= self.kv_cache.lengths[slot]
        self.kv_cache.lengths[slot] = length

    def truncate(self, slots: Integers, lengths: Integers) -> None:
        self._compute_delayed()
        self.kv_cache.lengths[slots] = np.minimum(self.kv_cache.lengths[slots], lengths)

    @property
    def supports_noise(self) -> bool:
        return self.graph_runner is not None and self.graph_runner.supports_noise

    def can_run_ahead(self, slots: Integers) -> bool:
        """Return whether `run_ahead` can be used: its CUDA graph was captured, and there is no draft head."""
        return (
            self.graph_runner is not None
            and self._feature_spec is None
            and self.graph_runner.can_run_ahead(np.asarray(slots, np.int64))
        )

    @torch.inference_mode()
    def run_ahead(self, slots: Integers, noise: Noise | None = None) -> PassOutput:
        assert self.graph_runner is not None
        rows = np.asarray(slots, np.int64)
        output = self.graph_runner.run_ahead(rows, noise)
        self._lengths[rows] += 1
        return output

    @torch.inference_mode()
    def accept_paths(self, slots: Integers, counts: Integers, paths: Sequence[npt.NDArray[np.int64]]) -> None:
        moves: list[npt.NDArray[np.int64]] = []
        for slot, count, path in zip(slots, counts, paths, strict=True):
            start = self.kv_cache.lengths[slot] - count
            self.kv_cache.lengths[slot] = start + len(path)
            self._token_ids[slot, start : start + len(path)] = self._token_ids[slot, start + path]
            to = np.flatnonzero(path != np.arange(len(path)))
            if len(to):
                moves.append(np.stack([np.full(len(to), slot), start + path[to], start + to]))
        if moves:
            self._store_features()
            together = torch.from_numpy(np.concatenate(moves, axis=1))
            if self.graph_runner is None or not self.graph_runner.moves.run(together):
                self.kv_cache.move(together.to(self.device))

    def _copy(self, source: int, slot: int, start: int, end: int) -> None:
        self._compute_delayed()
        self._store_features()
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
        assert self.graph_runner is None or self._adapter_rows is None  # captured passes do not apply adapters
        if self._delayed is not None:
            if trees is None and slots.tolist() == [self._delayed[0]]:
                kwargs = {"num_logits": tokens.shape[1], **kwargs}
                tokens = np.concatenate([self._pop_delayed()[1], tokens], axis=1)
            else:
                self._compute_delayed()
        output = None if self.graph_runner is None or kwargs else self.graph_runner.run(slots, tokens, trees, noise)
        if output is None:
            rows = SlotRows.build(self.kv_cache, slots.tolist(), tokens.shape[1], self.device, trees)
            with self._use_adapters(slots):
                output = PassOutput(self.score(torch.from_numpy(tokens).to(self.device), rows, **kwargs))
        return output

    def _use_adapters(self, slots: Int64s) -> AbstractContextManager[None]:
        if self._adapter_rows is None:
            return nullcontext()
        return self._adapter_rows.assign([self.adapters[slot] for slot in slots], self.device)

    def score(self, tokens: torch.Tensor, rows: SlotRows, **kwargs: Any) -> torch.Tensor:
        """Run the model over new tokens, int64[B, T], and return their logits.

        The caller must increase the lengths of the slots.
        """
        tapped, hidden = self._feature_spec, list[torch.Tensor]()
        # Padding may point past the model's last position, where learned position embeddings have no row.
        positions = rows.positions.clamp_max(self.max_length - 1)
        with self._compute_context():
            if self._flat is not None:
                layers = () if tapped is None else tapped.layers
                logits = self._flat.logits(tokens, positions, rows, layers=layers, hidden=hidden, **kwargs)
            else:
                with nullcontext(hidden) if self._tap is None else self._tap.recording() as hidden:
                    named = {"input_ids": tokens, "position_ids": positions, "slot_rows": rows, **kwargs}
                    logits = self.model(use_cache=False, **named).logits
        if tapped is not None:
            assert self.kv_cache.features is not None
            if tapped.combine is not None:
                rows.put(tapped.combine(hidden)[:, None], self.kv_cache.features)
            else:
                self._unstored.append((hidden, rows.slots, rows.starts))
                if len(self._unstored) == _MAX_UNSTORED or tokens.numel() > _MAX_UNSTORED:
                    self._store_features()
        return logits

    def _store_features(self) -> None:
        """Store the hidden states of recent passes now, because a draft head reads them, or they are moved."""
        for hidden, slots, starts in self._unstored:
            assert self.kv_cache.features is not None
            store_hidden_states(hidden, slots.tolist(), starts[:, 0].tolist(), self.kv_cache.features)
        self._unstored.clear()

    def warm_up(self) -> None:
        super().warm_up()
        if self.graph_runner is not None:
            self.graph_runner.warm_up(with_trees=self.can_verify_trees)
