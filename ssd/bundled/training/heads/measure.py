"""How far a head's drafts agree with text that the target wrote and that no training has seen."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import PreTrainedModel

from ssd.bundled.training.heads.chains import Draw, chains
from ssd.bundled.training.heads.texts import Written, gumbel, read
from ssd.bundled.training.loops import looped_tokens
from ssd.model.heads.head import Head
from ssd.model.layers.tap import Tap

DEPTH = 4
"""Tokens of the chain that is measured."""


def acceptance(target: PreTrainedModel, head: Head, texts: Written) -> dict[str, Any]:
    """Share of chains whose first d tokens the target wrote too, for each d, and their sum: accepted tokens a pass.

    Under "most_probable" each token is the head's most probable one; under "outside_loops" too, over chains that do not
    begin inside a loop of the text; under "same_noise", for sampled text only, it is drawn at the text's temperature
    with the noise the target drew with, as the engine does. O(depth * rows * length * V) for the noise.
    """
    hidden, _logits = read(target, texts.tokens, Tap(target, head.feature_layers))
    visible = texts.visible()
    looped = np.stack([looped_tokens(row) for row in texts.tokens.numpy()])
    figures: dict[str, Any] = {"temperature": texts.temperature}

    def agreement(draw: Draw, counted: npt.NDArray[np.bool_]) -> dict[str, Any]:
        drafts = chains(head, texts.tokens, hidden, target.config.vocab_size, DEPTH, draw)
        return _figures(texts.tokens, drafts, counted)

    figures["most_probable"] = agreement(_most_probable, visible)
    figures["outside_loops"] = agreement(_most_probable, visible & ~looped)
    figures["loop_share"] = round(float(looped[visible].mean()), 3)
    if texts.temperature:
        figures["same_noise"] = agreement(_same_noise(texts), visible)
    return figures


def _most_probable(logits: torch.Tensor) -> torch.Tensor:
    return logits.argmax(-1)


def _same_noise(texts: Written) -> Draw:
    """Draws with the noise of the text."""

    def draw(logits: torch.Tensor) -> torch.Tensor:
        rows, places, vocab_size = logits.shape
        drawn = torch.zeros(rows, places, dtype=torch.int64)
        for place in range(places):
            noise = gumbel(texts.seed, place + 2, rows, vocab_size)
            drawn[:, place] = (logits[:, place] / texts.temperature + noise).argmax(-1)
        return drawn

    return draw


def _figures(tokens: torch.Tensor, drafts: list[torch.Tensor], counted: npt.NDArray[np.bool_]) -> dict[str, Any]:
    """counted : bool[rows, length], the tokens whose chains count, by a chain's first token."""
    written = tokens.numpy()
    num_starts = written.shape[1] - 1 - len(drafts)
    right = np.ones((len(written), num_starts), np.bool_)
    starts = counted[:, 2 : 2 + num_starts]
    shares = []
    for depth, draft in enumerate(drafts):
        right &= draft[:, :num_starts].numpy() == written[:, depth + 2 : depth + 2 + num_starts]
        shares.append(float(right[starts].mean()))
    return {
        "chains": int(starts.sum()),
        "accepted_to_depth": [round(share, 4) for share in shares],
        "accepted": round(sum(shares), 3),
    }
