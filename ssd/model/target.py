"""What the engine needs of a target model."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from ssd.jit.addresses import Int64s, TokenIds, kernel
from ssd.model.kv.tree import TreeShape
from ssd.model.layers.packed_linear import prepare_linears
from ssd.model.sampling.sampler import Noise, PassOutput

if TYPE_CHECKING:
    from transformers import PreTrainedModel

TokenMatrix = npt.NDArray[np.int64]
Integers = Sequence[int] | Int64s


@dataclass(frozen=True, slots=True)
class Exactness:
    """Whether a position's logits are the same bits in every pass; `settle_exactness` finds out."""

    holds: bool = False
    reason: str = "not tried"
    """Why it does not hold."""
    num_compared: int = 0
    """Positions that were compared."""

    def __str__(self) -> str:
        if not self.holds:
            return f"outputs are equal up to rounding whatever is drafted, and not to the bit: {self.reason}"
        return f"outputs are equal to the bit whatever is drafted: {self.num_compared} positions compared, 0 differ"


class Target(ABC):
    """A causal language model with ``num_slots`` growing sequences whose ends can be taken back.

    ``can_roll_back`` : False for recurrent models, which cannot un-read a token; the engine then never drafts.
    """

    can_roll_back: bool = True
    can_keep_prefixes: bool = True
    """Whether any beginning of a slot can be copied, and gone back to at little cost."""
    can_verify_trees: bool = False
    """Whether passes may be over trees."""
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
        self.features: torch.Tensor | None = None
        """What a draft head reads of each position that slots hold, [num_slots, 1, length, size]; None: not asked for.
        """
        self.adapter_names: frozenset[str] = frozenset()
        """Adapters that slots may have."""
        self.adapters: list[str | None] = [None] * num_slots
        """Of each slot, the adapter that its tokens are computed with; to be set while the slot is empty."""
        self.exactness = Exactness()
        self._held: Int64s = np.zeros(num_slots, np.int64)
        self._fed: npt.NDArray[np.int32] = np.full((num_slots, max_length), -1, np.int32)

    @property
    def takes_noise(self) -> bool:
        """Whether passes that choose tokens do so with noise; where not, none may be given."""
        return False

    def length(self, slot: int) -> int:
        """Tokens the slot holds."""
        return int(self._held[slot])

    def lengths_of(self, slots: Integers) -> Int64s:
        """Tokens that each of these slots holds, int64[B]."""
        return self._held[np.asarray(slots, np.int64)]

    @abstractmethod
    def rollback(self, slot: int, length: int) -> None:
        """Forget everything after the slot's first ``length`` tokens; 0 frees the slot for another sequence."""

    def keep(self, slots: Integers, lengths: Integers) -> None:
        """Forget what slots hold beyond so many tokens each."""
        for slot, length in zip(slots, lengths, strict=True):
            if self.length(slot) > length:
                self.rollback(int(slot), int(length))

    @torch.inference_mode()
    def copy_prefix(self, source: int, slot: int, length: int) -> None:
        """Make ``slot`` hold the first ``length`` tokens of ``source`` without computing them.

        What ``slot`` holds already must be the beginning of the same text. Only where ``can_keep_prefixes``.
        """
        start = self.length(slot)
        assert self.can_keep_prefixes and slot != source and start <= length <= self.length(source)
        self._copy(source, slot, start, length)
        self._held[slot] = length
        self._fed[slot, start:length] = self._fed[source, start:length]

    def fed_tokens(self, slot: int) -> npt.NDArray[np.int32]:
        """The tokens that the slot's keys and values were computed from: a view, int32[length(slot)]."""
        return self._fed[slot, : self.length(slot)]

    def _feed(self, slots: Integers, tokens: TokenMatrix, counts: Integers, **kwargs: Any) -> PassOutput:
        rows, more = np.asarray(slots, np.int64), np.asarray(counts, np.int64)
        starts, tokens = self._held[rows], np.ascontiguousarray(tokens, np.int64)
        _note(self._fed, rows, starts, tokens, more)
        output = self._append(rows, tokens, more, **kwargs)
        self._held[rows] = starts + more
        return output

    def _copy(self, source: int, slot: int, start: int, end: int) -> None:
        """Append to ``slot``, which holds ``start`` tokens, positions ``start`` to ``end`` of ``source``."""
        raise NotImplementedError(f"driven {self.way}, slots keep nothing for others")

    @abstractmethod
    def _append(self, slots: Int64s, tokens: TokenMatrix, counts: Int64s, **kwargs: Any) -> PassOutput:
        """Append ``counts[b]`` tokens, which are noted, to what each slot holds; logits [B, T or fewer, V]."""

    @torch.inference_mode()
    def forward(
        self,
        slots: Integers,
        tokens: TokenMatrix,
        counts: Integers,
        noise: Noise | None = None,
        parents: TokenMatrix | None = None,
    ) -> PassOutput:
        """Append tokens to slots and score every position in one pass.

        slots : B distinct slots. tokens : int64[B, T], row b valid in its first ``counts[b]`` (>= 1) entries, the
        rest any valid token id. noise : where the target `takes_noise`, what the pass chooses tokens with.
        parents : where it `can_verify_trees`, int64[B, T], of each token the index of the one it goes on from, smaller
        than its own; -1 of the first and of no other. A row of 0, 1, 2 ... is a chain. Each token is scored after the
        path to it. The slots then hold trees: ``keep_paths`` must follow.
        """
        assert noise is None or self.takes_noise
        more: dict[str, Any] = {} if noise is None else {"noise": noise}
        if parents is not None:
            more["trees"] = TreeShape.build(parents)
        return self._feed(slots, tokens, counts, **more)

    def can_follow(self, slots: Integers) -> bool:
        """Whether `follow` can be called for these slots now."""
        return False

    def follow(self, slots: Integers, noise: Noise | None = None) -> PassOutput:
        """A pass over the tokens that the last one chose, one for each of its slots, before anybody has read them.

        What that gave out must be `held`; what it chose is to be told to `note`. noise : as for ``forward``.
        """
        raise NotImplementedError(f"driven {self.way}, passes wait for tokens")

    def note(self, slots: Int64s, starts: Int64s, tokens: TokenMatrix) -> None:
        """What slots were fed at so many positions by `follow`: int64[B, 1]."""
        _note(self._fed, slots, starts, tokens, np.ones(len(slots), np.int64))

    def keep_paths(self, slots: Integers, counts: Integers, paths: Sequence[npt.NDArray[np.int64]]) -> None:
        """Keep the tokens on one path of each row of the pass just made, as if they alone had been fed, in its order.

        slots, counts : those of the pass. paths : int64[n], n >= 1, indices into the row, from its first token on.
        """
        raise NotImplementedError(f"driven {self.way}, a model verifies chains only")

    def warm_up(self) -> None:
        """Prepare what later passes would otherwise have to wait for."""
        prepare_linears(self.model)

    @torch.inference_mode()
    def prefill(self, slots: Integers, tokens: TokenMatrix, counts: Integers) -> None:
        """Append tokens to slots without scoring them."""
        self._feed(slots, tokens, counts, **self._keep_last)


@kernel
def _note(fed: TokenIds, slots: Int64s, starts: Int64s, tokens: TokenMatrix, counts: Int64s) -> None:
    """Note what slots are fed behind what they hold, as far as there is room: what lies beyond is never text."""
    for b in range(len(slots)):
        for t in range(min(counts[b], fed.shape[1] - starts[b])):
            fed[slots[b], starts[b] + t] = tokens[b, t]


def pad_rows(rows: Sequence[npt.NDArray[np.int32] | npt.NDArray[np.int64]]) -> TokenMatrix:
    """Rows of different length as int64[B, T], padded with 0; at least one row, none empty."""
    padded = np.zeros((len(rows), max(map(len, rows))), np.int64)
    for b, row in enumerate(rows):
        padded[b, : len(row)] = row
    return padded


def accepts(model: PreTrainedModel, name: str) -> bool:
    """Whether the model's forward pass has an argument of this name."""
    return name in inspect.signature(model.forward).parameters
