"""What the engine needs of a target model, and the ways to provide it for models with attention."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import DynamicCache, PreTrainedModel

from ssd.model.attention import ATTENTION_NAME
from ssd.model.kv_cache import SlotKVCache, SlotRows
from ssd.model.layers.packed_linear import prepare_linears
from ssd.model.sampling.noise import Noise
from ssd.model.steps.static_steps import Scored, StaticSteps
from ssd.model.tree import TreeShape

TokenMatrix = npt.NDArray[np.int64]


class Target(ABC):
    """A causal language model with ``num_slots`` growing sequences whose ends can be taken back.

    ``can_roll_back`` : False for recurrent models, which cannot un-read a token; the engine then never drafts.
    """

    can_roll_back: bool = True
    can_keep_prefixes: bool = True
    """Whether any beginning of a slot can be copied, and gone back to at little cost."""
    can_verify_trees: bool = False
    """Whether ``forward_trees`` and ``keep_paths`` are to be had."""
    best: torch.Tensor | None = None
    """int64[B, T], the tokens that the pass just scored chose itself, where it did: with the noise it was given, else
    the most probable ones."""
    way: str
    """How the model is driven, for logs."""

    def __init__(self, model: PreTrainedModel, num_slots: int, max_length: int) -> None:
        self.model = model
        self.num_slots = num_slots
        self.max_length = max_length
        self.device: torch.device = model.device
        self.runs_beside_host = self.device.type != "cpu"
        """Whether a pass that was begun goes on while the host does something else."""
        self.dtype: torch.dtype = model.dtype
        config = model.config.get_text_config()
        self.vocab_size: int = config.vocab_size
        self._keep_last = {"logits_to_keep": 1} if accepts(model, "logits_to_keep") else {}
        self._fed: npt.NDArray[np.int32] = np.full((num_slots, max_length), -1, np.int32)

    @property
    def takes_noise(self) -> bool:
        """Whether passes that choose tokens do so with noise; where not, none may be given."""
        return False

    @abstractmethod
    def length(self, slot: int) -> int:
        """Tokens the slot holds."""

    @abstractmethod
    def rollback(self, slot: int, length: int) -> None:
        """Forget everything after the slot's first ``length`` tokens; 0 frees the slot for another sequence."""

    @torch.inference_mode()
    def copy_prefix(self, source: int, slot: int, length: int) -> None:
        """Make ``slot`` hold the first ``length`` tokens of ``source`` without computing them.

        What ``slot`` holds already must be the beginning of the same text. Only where ``can_keep_prefixes``.
        """
        start = self.length(slot)
        assert self.can_keep_prefixes and slot != source and start <= length <= self.length(source)
        self._copy(source, slot, start, length)
        self._fed[slot, start:length] = self._fed[source, start:length]

    def fed_tokens(self, slot: int) -> npt.NDArray[np.int32]:
        """The tokens that the slot's keys and values were computed from: a view, int32[length(slot)]."""
        return self._fed[slot, : self.length(slot)]

    def _feed(self, slots: Sequence[int], tokens: TokenMatrix, counts: Sequence[int], **kwargs: Any) -> torch.Tensor:
        for slot, row, count in zip(slots, tokens, counts, strict=True):
            room = self._fed[slot, self.length(slot) :][:count]
            room[:] = row[: len(room)]
        return self._append(slots, tokens, counts, **kwargs)

    def _copy(self, source: int, slot: int, start: int, end: int) -> None:
        """Append to ``slot``, which holds ``start`` tokens, positions ``start`` to ``end`` of ``source``."""
        raise NotImplementedError(f"driven {self.way}, slots keep nothing for others")

    @abstractmethod
    def _append(self, slots: Sequence[int], tokens: TokenMatrix, counts: Sequence[int], **kwargs: Any) -> torch.Tensor:
        """Append ``counts[b]`` tokens to each slot and return logits [B, T or fewer, V]."""

    @torch.inference_mode()
    def forward(
        self, slots: Sequence[int], tokens: TokenMatrix, counts: Sequence[int], noise: Noise | None = None
    ) -> torch.Tensor:
        """Append tokens to slots and score every position in one pass.

        slots : B distinct slots. tokens : int64[B, T], row b valid in its first ``counts[b]`` (>= 1) entries, the
        rest any valid token id. Returns logits [B, T, V]; ``[b, t]`` predicts the token after ``tokens[b, t]``. They
        are valid until the next pass. noise : where the target `takes_noise`, for ``best``.
        """
        assert noise is None
        return self._feed(slots, tokens, counts)

    def forward_trees(
        self,
        slots: Sequence[int],
        tokens: TokenMatrix,
        counts: Sequence[int],
        parents: TokenMatrix,
        noise: Noise | None = None,
    ) -> torch.Tensor:
        """As ``forward``, but each row is a tree: its token t is scored after the path to it instead of all before it.

        parents : int64[B, T], of each token the index of the one it goes on from, smaller than its own; -1 of the first
        and of no other. A row of 0, 1, 2 ... is a chain. The slots then hold trees: ``keep_paths`` must follow.
        """
        raise NotImplementedError(f"driven {self.way}, a model verifies chains only")

    def keep_paths(self, slots: Sequence[int], counts: Sequence[int], paths: Sequence[npt.NDArray[np.int64]]) -> None:
        """Of the pass just made keep the tokens on one path of each row, as if they alone had been fed, in its order.

        slots, counts : those of the pass. paths : int64[n], n >= 1, indices into the row, from its first token on.
        """
        raise NotImplementedError(f"driven {self.way}, a model verifies chains only")

    def warm_up(self) -> None:
        """Prepare what later passes would otherwise have to wait for."""
        prepare_linears(self.model)

    @torch.inference_mode()
    def prefill(self, slots: Sequence[int], tokens: TokenMatrix, counts: Sequence[int]) -> None:
        """Append tokens to slots without scoring them."""
        self._feed(slots, tokens, counts, **self._keep_last)


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

    def length(self, slot: int) -> int:
        """Tokens the slot holds."""
        return int(self.kv_cache.lengths[slot])

    def rollback(self, slot: int, length: int) -> None:
        """Lower the slot's length; what lies beyond is overwritten later."""
        assert 0 <= length <= self.kv_cache.lengths[slot]
        self.kv_cache.lengths[slot] = length

    @property
    def takes_noise(self) -> bool:
        """Whether passes choose tokens with noise."""
        return self.steps is not None and self.steps.takes_noise

    @torch.inference_mode()
    def forward(
        self, slots: Sequence[int], tokens: TokenMatrix, counts: Sequence[int], noise: Noise | None = None
    ) -> torch.Tensor:
        """Score tokens, see ``Target``."""
        return self._feed(slots, tokens, counts, noise=noise)

    @torch.inference_mode()
    def forward_trees(
        self,
        slots: Sequence[int],
        tokens: TokenMatrix,
        counts: Sequence[int],
        parents: TokenMatrix,
        noise: Noise | None = None,
    ) -> torch.Tensor:
        """Score the tokens of trees, see ``Target``."""
        return self._feed(slots, tokens, counts, trees=TreeShape.build(parents), noise=noise)

    @torch.inference_mode()
    def keep_paths(self, slots: Sequence[int], counts: Sequence[int], paths: Sequence[npt.NDArray[np.int64]]) -> None:
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
            slots_and_places = np.concatenate(moves, axis=1)
            if self.steps is None or not self.steps.moves.run(*slots_and_places):
                self.kv_cache.move(*slots_and_places)

    def _copy(self, source: int, slot: int, start: int, end: int) -> None:
        self.kv_cache.copy(source, slot, start, end)
        self.kv_cache.lengths[slot] = end

    def _append(
        self,
        slots: Sequence[int],
        tokens: TokenMatrix,
        counts: Sequence[int],
        trees: TreeShape | None = None,
        noise: Noise | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        scored = None if self.steps is None or kwargs else self.steps.run(slots, tokens, trees, noise)
        if scored is None:
            rows = SlotRows.build(self.kv_cache, list(slots), tokens.shape[1], self.device, trees)
            scored = Scored(self.score(torch.from_numpy(tokens).to(self.device), rows, **kwargs), None)
        self.kv_cache.lengths[list(slots)] += np.asarray(counts)
        self.best = scored.best
        return scored.logits

    def score(self, tokens: torch.Tensor, rows: SlotRows, **kwargs: Any) -> torch.Tensor:
        """The model over new tokens, int64[B, T], of rows: logits [B, T or fewer, V]. Lengths stay as they are."""
        logits: torch.Tensor = self.model(
            input_ids=tokens,
            # Padding may point past the model's last position, where learned position embeddings have no row.
            position_ids=rows.positions.clamp_max(self.max_length - 1),
            use_cache=False,
            slot_rows=rows,
            **kwargs,
        ).logits
        return logits

    def warm_up(self) -> None:
        """Record the passes that are made most."""
        super().warm_up()
        if self.steps is not None:
            self.steps.warm_up(with_trees=self.can_verify_trees)


class RowTarget(Target):
    """Models that slot attention does not reach: one Hugging Face cache per slot, rows computed one after another.

    Slower in a batch, but any position encoding works, and any cache whose end can be cropped.
    """

    way = "row by row"

    def __init__(self, model: PreTrainedModel, num_slots: int, max_length: int) -> None:
        super().__init__(model, num_slots, max_length)
        self._takes_positions = accepts(model, "position_ids")
        self._caches = [self._new_cache() for _ in range(num_slots)]
        self._lengths = [0] * num_slots

    def length(self, slot: int) -> int:
        """Tokens the slot holds."""
        return self._lengths[slot]

    def rollback(self, slot: int, length: int) -> None:
        """Crop the slot's cache."""
        removed = self._lengths[slot] - length
        assert removed >= 0
        if length == 0:
            self._caches[slot] = self._new_cache()
        elif removed:
            self._caches[slot].crop(-removed)
        self._lengths[slot] = length

    def bytes_per_token(self, slot: int) -> int:
        """Bytes that a token of a slot takes, which must hold some."""
        tensors = [tensor for layer in self._caches[slot].layers for tensor in (layer.keys, layer.values)]
        return int(sum(tensor.nbytes for tensor in tensors)) // self._lengths[slot]

    def _copy(self, source: int, slot: int, start: int, end: int) -> None:
        for index, layer in enumerate(self._caches[source].layers):
            self._caches[slot].update(layer.keys[..., start:end, :], layer.values[..., start:end, :], index)
        self._lengths[slot] = end

    def _append(self, slots: Sequence[int], tokens: TokenMatrix, counts: Sequence[int], **kwargs: Any) -> torch.Tensor:
        rows = [
            self._append_row(slot, row[:count], **kwargs)
            for slot, row, count in zip(slots, tokens, counts, strict=True)
        ]
        return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)

    def _append_row(self, slot: int, tokens: npt.NDArray[np.int64], **kwargs: Any) -> torch.Tensor:
        """One pass over one row's new tokens, int64[n]: logits [n or fewer, V]."""
        start = self._lengths[slot]
        end = start + len(tokens)
        if self._takes_positions:
            kwargs["position_ids"] = torch.arange(start, end, device=self.device)[None]
        ids = torch.from_numpy(tokens[None]).to(self.device)
        logits = self._run(slot, ids, **kwargs)
        self._lengths[slot] = end
        return logits

    def _run(self, slot: int, ids: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        """Feed ids, int64[1, n], to the model on top of the slot's cache."""
        logits: torch.Tensor = self.model(
            input_ids=ids, use_cache=True, past_key_values=self._caches[slot], **kwargs
        ).logits[0]
        return logits

    def _new_cache(self) -> Any:
        # Without the model's configuration every layer keeps all positions, those beyond a window too: the end can be
        # cropped to any length.
        return DynamicCache()


def accepts(model: PreTrainedModel, name: str) -> bool:
    """Whether the model's forward pass has an argument of this name."""
    return name in inspect.signature(model.forward).parameters
