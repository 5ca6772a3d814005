"""The interface between the engine and a target model."""

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
from ssd.model.cpu.packed_linear import prepare_linears
from ssd.model.kv.tree import TreeShape
from ssd.model.sampling.sampler import Noise, PassOutput, greedy_tokens

if TYPE_CHECKING:
    from transformers import PreTrainedModel

TokenMatrix = npt.NDArray[np.int64]
Integers = Sequence[int] | Int64s


@dataclass(frozen=True, slots=True)
class BatchInvariance:
    """Whether a position's logits are bit-identical in every forward pass, and the reason if they are not."""

    is_invariant: bool = False
    reason: str = "not tried"  # why the logits are not bit-identical
    num_compared: int = 0  # the number of positions that were compared

    def __str__(self) -> str:
        if not self.is_invariant:
            return f"outputs are equal up to rounding, but not bit-identical, whatever is drafted: {self.reason}"
        return f"outputs are bit-identical whatever is drafted: {self.num_compared} positions compared, 0 differ"


class Target(ABC):
    """A causal language model with a KV cache of ``num_slots`` slots, each of which can be extended and truncated."""

    can_roll_back: bool = True  # False for recurrent models, whose state cannot be undone; the engine then never drafts
    can_copy_prefixes: bool = True  # whether any prefix of a slot can be copied to another slot and restored cheaply
    can_verify_trees: bool = False  # whether forward passes accept draft trees
    can_delay_prefill: bool = False  # whether `delay_prefill` can be used
    has_delayed_prefill: bool = False  # whether the next forward pass computes tokens of `delay_prefill`
    backend: str  # the name of the model runner, for logs and metrics

    def __init__(self, model: PreTrainedModel, num_slots: int, max_length: int) -> None:
        self.model = model
        self.num_slots = num_slots
        self.max_length = max_length
        self.device: torch.device = model.device
        self.is_asynchronous = self.device.type != "cpu"  # the device computes while the host continues
        self.dtype: torch.dtype = model.dtype
        config = model.config.get_text_config()
        self.vocab_size: int = config.vocab_size
        self._prefill_options = {"logits_to_keep": 1} if has_argument(model, "logits_to_keep") else {}
        self.adapter_names: frozenset[str] = frozenset()  # the LoRA adapters that slots may use
        # The LoRA adapter of each slot; change it while the slot is empty.
        self.adapters: list[str | None] = [None] * num_slots
        self.batch_invariance = BatchInvariance()
        self._lengths: Int64s = np.zeros(num_slots, np.int64)
        self._token_ids: npt.NDArray[np.int32] = np.full((num_slots, max_length), -1, np.int32)

    @property
    def supports_noise(self) -> bool:
        """Whether forward passes can sample tokens on the device with Gumbel noise; else `forward` accepts no noise."""
        return False

    def length(self, slot: int) -> int:
        return int(self._lengths[slot])

    def lengths_of(self, slots: Integers) -> Int64s:
        """Return the number of tokens in each KV cache slot, int64[B]."""
        return self._lengths[np.asarray(slots, np.int64)]

    @abstractmethod
    def rollback(self, slot: int, length: int) -> None:
        """Truncate a KV cache slot to its first ``length`` tokens; 0 frees the slot for another sequence."""

    def truncate(self, slots: Integers, lengths: Integers) -> None:
        """Truncate each KV cache slot ``slots[b]`` to ``lengths[b]`` tokens; shorter slots stay unchanged."""
        for slot, length in zip(slots, lengths, strict=True):
            if self.length(slot) > length:
                self.rollback(int(slot), int(length))

    @torch.inference_mode()
    def copy_prefix(self, source: int, slot: int, length: int) -> None:
        """Copy the KV cache of the first ``length`` tokens of the slot ``source`` to ``slot``.

        The tokens that ``slot`` already contains must be a prefix of these tokens. Requires ``can_copy_prefixes``.
        """
        start = self.length(slot)
        assert self.can_copy_prefixes and slot != source and start <= length <= self.length(source)
        self._copy(source, slot, start, length)
        self._lengths[slot] = length
        self._token_ids[slot, start:length] = self._token_ids[source, start:length]

    def cached_tokens(self, slot: int) -> npt.NDArray[np.int32]:
        """Return the tokens whose keys and values a KV cache slot contains: a view, int32[length(slot)]."""
        return self._token_ids[slot, : self.length(slot)]

    def _append_tokens(self, slots: Integers, tokens: TokenMatrix, counts: Integers, **kwargs: Any) -> PassOutput:
        rows, more = np.asarray(slots, np.int64), np.asarray(counts, np.int64)
        starts, tokens = self._lengths[rows], np.ascontiguousarray(tokens, np.int64)
        _record_tokens(self._token_ids, rows, starts, tokens, more)
        output = self._append(rows, tokens, more, **kwargs)
        self._lengths[rows] = starts + more
        return output

    def _copy(self, source: int, slot: int, start: int, end: int) -> None:
        """Copy KV cache positions ``start`` to ``end`` of ``source`` to ``slot``, which has ``start`` tokens."""
        raise NotImplementedError(f"the runner {self.backend!r} cannot copy prefixes between slots")

    @abstractmethod
    def _append(self, slots: Int64s, tokens: TokenMatrix, counts: Int64s, **kwargs: Any) -> PassOutput:
        """Run a forward pass over the first ``counts[b]`` tokens of each row, for `forward` and `prefill`.

        Returns logits [B, T, V]; positions after max(counts) may be left out.
        """

    @torch.inference_mode()
    def forward(
        self,
        slots: Integers,
        tokens: TokenMatrix,
        counts: Integers,
        noise: Noise | None = None,
        parents: TokenMatrix | None = None,
    ) -> PassOutput:
        """Append tokens to KV cache slots and compute the logits of every position in one forward pass.

        Each position's logits depend on the tokens before it in the slot and in the row or, in a draft tree, on the
        path to it.

        Args:
            slots: The KV cache slot of each row.
            tokens: The new tokens, int64[B, T]; row b is padded with any valid token id after ``counts[b]`` tokens.
            counts: The number of new tokens of each row, >= 1.
            noise: The noise for sampling tokens in the same pass. Requires `supports_noise`.
            parents: For draft trees, the index of each token's parent in the row, int64[B, T]. It is smaller than the
                token's own index, and -1 for the first token; -1, 0, 1 ... is a chain. Requires `can_verify_trees`, and
                the caller must call ``accept_paths`` next.
        """
        assert noise is None or self.supports_noise
        more: dict[str, Any] = {} if noise is None else {"noise": noise}
        if parents is not None:
            more["trees"] = TreeShape.build(parents)
        return self._append_tokens(slots, tokens, counts, **more)

    def can_run_ahead(self, slots: Integers) -> bool:
        """Return whether `run_ahead` can launch the next forward pass of these slots."""
        return False

    def run_ahead(self, slots: Integers, noise: Noise | None = None) -> PassOutput:
        """Launch the next forward pass on the tokens that the last pass sampled, before the host has read these tokens.

        The device therefore does not wait for the host. The slots must be those of the last pass; one token is appended
        to each. Before this call, the caller must call `start_copy_to_host` on the last pass's output. When the copied
        tokens have arrived, the caller must pass them to `record_tokens`. ``noise`` is as for `forward`.
        """
        raise NotImplementedError(
            f"the runner {self.backend!r} cannot launch a forward pass before the tokens of the last pass are read"
        )

    def record_tokens(self, slots: Int64s, starts: Int64s, tokens: TokenMatrix) -> None:
        """Record which tokens, int64[B, 1], a `run_ahead` call has appended to ``slots`` at the positions ``starts``.

        The host does not know these tokens yet when it calls `run_ahead`.
        """
        _record_tokens(self._token_ids, slots, starts, tokens, np.ones(len(slots), np.int64))

    def accept_paths(self, slots: Integers, counts: Integers, paths: Sequence[npt.NDArray[np.int64]]) -> None:
        """Keep only the accepted path of each draft tree in the KV cache after a forward pass over draft trees.

        ``counts`` is the number of tokens in each tree; ``paths`` are the indices of the accepted tokens in each row,
        int64[n] with n >= 1, beginning with the row's first token.
        """
        raise NotImplementedError(f"the runner {self.backend!r} verifies draft chains only, no trees")

    def warm_up(self) -> None:
        """Prepare the target, e.g. capture CUDA graphs, so that the first forward passes do not have to wait."""
        prepare_linears(self.model)
        greedy_tokens(torch.zeros(1, self.vocab_size, dtype=self.dtype, device=self.device))  # compiles a kernel

    @torch.inference_mode()
    def prefill(self, slots: Integers, tokens: TokenMatrix, counts: Integers) -> None:
        """Append tokens to KV cache slots without returning their logits."""
        self._append_tokens(slots, tokens, counts, **self._prefill_options)

    @property
    def features(self) -> torch.Tensor | None:
        """Return what is stored for the draft head, [num_slots, layers, length, size]; None without a head.

        ``layers`` is 1 if the hidden states of several layers were combined, see `FeatureSpec.combine`.

        Tokens of `delay_prefill` are computed first.
        """
        return None

    def delay_prefill(self, slot: int, tokens: npt.NDArray[np.int32]) -> None:
        """Append tokens to a KV cache slot, but let the next forward pass over this slot alone compute them.

        So the weights are read once less before the first output token. Requires `can_delay_prefill`.
        """
        raise NotImplementedError(f"the runner {self.backend!r} cannot delay a prefill")


@kernel
def _record_tokens(fed: TokenIds, slots: Int64s, starts: Int64s, tokens: TokenMatrix, counts: Int64s) -> None:
    for b in range(len(slots)):
        for t in range(min(counts[b], fed.shape[1] - starts[b])):
            fed[slots[b], starts[b] + t] = tokens[b, t]


def pad_rows(rows: Sequence[npt.NDArray[np.int32] | npt.NDArray[np.int64]]) -> TokenMatrix:
    """Return arrays of different lengths as one array, int64[B, T], padded with 0; no array may be empty."""
    padded = np.zeros((len(rows), max(map(len, rows))), np.int64)
    for b, row in enumerate(rows):
        padded[b, : len(row)] = row
    return padded


def has_argument(model: PreTrainedModel, name: str) -> bool:
    return name in inspect.signature(model.forward).parameters
