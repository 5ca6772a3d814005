"""A target that recites: its passes are driven as recorded ones on a GPU are, and compute nothing."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import PreTrainedModel

from ssd.drafting.successors import SUCCESSORS
from ssd.model.kv.kv_cache import SlotRows
from ssd.model.kv.tree import TreeShape
from ssd.model.sampling.noise import Noise
from ssd.model.sampling.pass_output import PassOutput
from ssd.model.steps.graphs import Step
from ssd.model.steps.static_steps import StaticSteps
from ssd.model.target import TokenMatrix
from ssd.model.ways.slot_target import SlotTarget

Texts = npt.NDArray[np.int64]

_CERTAIN = 1e9
"""Of token 0, while passes are recorded: it is the choice under any noise."""
_TOP = torch.arange(SUCCESSORS, 0, -1, dtype=torch.float32).view(torch.int32)
"""Logits of what is held most probable at every position, as bits."""


class RecitingTarget(SlotTarget):
    """Says of every slot the text that it was given, token by token, and behind a token that is not of it no more.

    Lengths, recorded shapes, buffers and their one copy are those of a GPU's target; what is recorded does nothing. The
    time that a device would take is waited for in the call that begins a pass, and is counted with what it takes to
    say the text: ``device_s``, of all passes.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        num_slots: int,
        max_length: int,
        max_width: int,
        pass_seconds: Callable[[int], float],
    ) -> None:
        """``model`` : for its configuration. ``pass_seconds`` : of a pass over so many positions."""
        super().__init__(model, num_slots, max_length, max_width)
        self.runs_beside_host = True
        self.can_verify_trees = True
        self.device_s = 0.0
        self._pass_seconds = pass_seconds
        self._texts: Texts = np.zeros((num_slots, max_length + max_width + 1), np.int64)
        self._is_recorded = False
        self.steps = StaticSteps(
            self.score,
            self.kv_cache,
            max_length=max_length,
            max_width=max_width,
            record=self._recorded,
            tolerance=1e-4,
            sampler=lambda logits, _keys, _temperatures: logits.argmax(-1),
            name="recited",
            keeps_top=True,
        )
        self.prefill([0], np.zeros((1, 1), np.int64), [1])  # keys and values are there from now on
        self.rollback(0, 0)

    def warm_up(self) -> None:
        """Record passes, which compute nothing afterwards."""
        super().warm_up()
        self._is_recorded = True

    def recite(self, slot: int, text: npt.NDArray[np.int32]) -> None:
        """What ``slot`` says from now on at every position, of the prompt too: int32[n], n at most what it has room
        for."""
        self._texts[slot, : len(text)] = text

    def score(self, tokens: torch.Tensor, rows: SlotRows, **kwargs: Any) -> torch.Tensor:
        """Logits of token 0, [B, T, V]; keys and values of one number a position."""
        places = torch.zeros(len(tokens), 1, tokens.shape[1], 1)
        rows.kv_cache.store(0, rows, places, places)
        logits = torch.zeros(1, 1, self.vocab_size)
        logits[..., 0] = _CERTAIN
        return logits.expand(*tokens.shape, -1)

    def _recorded(self, step: Step) -> Step:
        return lambda: None if self._is_recorded else step()

    def _said(
        self, slots: npt.NDArray[np.int64], starts: npt.NDArray[np.int64], tokens: TokenMatrix, trees: TreeShape | None
    ) -> TokenMatrix:
        """What follows each token, int64[B, T]: the text's next; behind what the text does not say, anything else."""
        ahead = np.arange(tokens.shape[1]) if trees is None else trees.depths
        at = slots[:, None], starts[:, None] + ahead
        differs = self._texts[at] != tokens
        if trees is None:
            is_lost = np.logical_or.accumulate(differs, axis=1)
        else:
            is_lost = (trees.sees & differs[:, None, :]).any(-1)
        following = self._texts[at[0], at[1] + 1]
        said: TokenMatrix = np.where(is_lost, (31 * following + 7 * tokens + 1) % self.vocab_size, following)
        return said

    def _append(
        self,
        slots: Sequence[int],
        tokens: TokenMatrix,
        counts: Sequence[int],
        trees: TreeShape | None = None,
        noise: Noise | None = None,
        **kwargs: Any,
    ) -> PassOutput:
        starts = self.kv_cache.lengths[list(slots)]
        output = super()._append(slots, tokens, counts, trees, noise, **kwargs)
        began = time.perf_counter()
        if output.chosen is not None and output.packed_top is not None:
            said = torch.from_numpy(self._said(np.array(slots), starts, tokens, trees))
            output.chosen.copy_(said)
            output.packed_top[..., 0, :] = (said[..., None] + torch.arange(SUCCESSORS)) % self.vocab_size
            output.packed_top[..., 1, :] = _TOP
        until = began + self._pass_seconds(tokens.size)
        while time.perf_counter() < until:
            pass
        self.device_s += time.perf_counter() - began
        return output
