"""What is measured of the model and of its head: loops, bits, and how far drafts agree with text that the model wrote
and that no training has seen."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from tokenizers import Tokenizer
from torch.nn import functional
from transformers import DynamicCache, PreTrainedModel

from benchmarks.training.corpus import (
    END_OF_TEXT_ID,
    Prefixes,
    SourceFile,
    conversations,
    held_out_documents,
    render,
)
from ssd.model.heads.networks import Head
from ssd.model.layers.tap import Tap

# A small model decoded greedily soon repeats itself, and repeated text is what a retrieval drafter predicts best. The
# share in loops says how far a speed-up may be trusted; training uses the same definition to push loops away.
MAX_PERIOD = 32
"""Longest repeated unit that counts as a loop, in tokens."""
MIN_LOOP_TOKENS = 8
"""Shortest looped stretch, in tokens: keeps ``))))`` and dashed lines of a table from counting."""


def looped_tokens(
    token_ids: Sequence[int] | npt.NDArray[np.integer], *, first_copy: bool = True
) -> npt.NDArray[np.bool_]:
    """Mark the tokens of every stretch that is two or more whole copies of a unit of 1 to ``MAX_PERIOD`` tokens.

    Returns bool[n], True inside a loop. ``first_copy`` False leaves out what a model may say: the first time. A stretch
    has at least ``MIN_LOOP_TOKENS`` tokens.
    """
    tokens = np.asarray(token_ids)
    mask = np.zeros(len(tokens), np.bool_)
    for period in range(1, min(MAX_PERIOD, len(tokens) // 2) + 1):
        same = tokens[period:] == tokens[:-period]
        # Edges of the runs of True: a run [lo, hi) of `same` is the looped stretch [lo, hi + period) of the text.
        edges = np.flatnonzero(np.diff(np.concatenate([[0], same.astype(np.int8), [0]])))
        for lo, hi in zip(edges[::2], edges[1::2], strict=True):
            if hi - lo >= period and hi - lo + period >= MIN_LOOP_TOKENS:
                mask[lo if first_copy else lo + period : hi + period] = True
    return mask


@torch.inference_mode()
def bits_per_byte(
    model: PreTrainedModel, documents: list[npt.NDArray[np.int64]], num_bytes: int, row_length: int
) -> float:
    """Cost of the held-out text, all documents end to end, cut into rows that are read without what came before."""
    tokens = torch.from_numpy(np.concatenate(documents))
    training = model.training
    model.eval()
    nats = 0.0
    for start in range(0, len(tokens) - 1, row_length):
        row = tokens[start : start + row_length + 1]
        logits = model(input_ids=row[None, :-1], use_cache=False).logits[0].float()
        nats += functional.cross_entropy(logits, row[1:], reduction="sum").item()
    model.train(training)
    return nats / math.log(2) / num_bytes


ROW_LENGTH = 256
TEMPERATURES = (0.7, 0.0, 1.0, 0.7)
"""Of the batches of written text in turn; every fourth answers questions."""


@dataclass(frozen=True, slots=True)
class Written:
    """Rows that the model wrote, each behind a prefix of the same length.

    ``tokens`` : int64[rows, length]. ``start`` : length of the prefix. ``temperature`` : 0 for greedy. ``seed`` : of
    the noise they were drawn with.
    """

    tokens: torch.Tensor
    start: int
    temperature: float
    seed: int

    def visible(self) -> npt.NDArray[np.bool_]:
        """Which tokens the model wrote that a client would see, bool[rows, length]: up to end-of-text."""
        tokens = self.tokens[:, self.start :].numpy()
        before = np.cumsum(tokens == END_OF_TEXT_ID, axis=1) - (tokens == END_OF_TEXT_ID) == 0
        return np.concatenate([np.zeros((len(tokens), self.start), np.bool_), before], axis=1)


def gumbel(seed: int, position: int, num_rows: int, vocab_size: int) -> torch.Tensor:
    """The noise that the tokens at one position are drawn with, float32[num_rows, vocab_size]."""
    generator = torch.Generator().manual_seed(seed * 1_000_003 + position)
    uniform = torch.rand(num_rows, vocab_size, generator=generator).clamp_(1e-20, 1 - 1e-7)
    return -torch.log(-torch.log(uniform))


@torch.no_grad()
def write(model: PreTrainedModel, prefixes: torch.Tensor, length: int, temperature: float, seed: int) -> Written:
    """Let the model go on from prefixes, int64[rows, start], to rows of ``length``; end-of-text does not stop it."""
    cache = DynamicCache(config=model.config)
    tokens = inputs = prefixes
    for position in range(prefixes.shape[1], length):
        logits = model(input_ids=inputs, past_key_values=cache, logits_to_keep=1).logits[:, -1]
        if temperature:
            logits = logits / temperature + gumbel(seed, position, *logits.shape)
        inputs = logits.argmax(-1, keepdim=True)
        tokens = torch.cat([tokens, inputs], dim=1)
    return Written(tokens.clone(), prefixes.shape[1], temperature, seed)


def write_batches(
    model: PreTrainedModel,
    documents: list[npt.NDArray[np.int64]],
    seed: int,
    rows: int,
    temperatures: Sequence[float],
    length: int = ROW_LENGTH,
) -> list[Written]:
    """A batch of ``rows`` for each of ``temperatures``, behind prefixes cut from ``documents``."""
    prefixes = Prefixes(documents, seed, rows)
    return [
        write(model, prefixes.batch(step), length, temperature, 1000 * seed + step)
        for step, temperature in enumerate(temperatures)
    ]


def held_out_prompts(files: list[SourceFile], tokenizer: Tokenizer) -> list[npt.NDArray[np.int64]]:
    """Token ids of the files that nothing was trained on, and of their conversations."""
    documents, _num_bytes = held_out_documents(files, tokenizer)
    texts = [render(messages) for file in files if file.held_out for messages in conversations(file)]
    return documents + [np.array(encoding.ids, np.int64) for encoding in tokenizer.encode_batch(texts)]


@torch.no_grad()
def read(model: PreTrainedModel, tokens: torch.Tensor, tap: Tap) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Hidden states that the tap takes, [rows, length, H] each, and logits, of every position of rows."""
    with tap.listening() as hidden:
        logits: torch.Tensor = model(input_ids=tokens, use_cache=False).logits
    return hidden, logits


Draw = Callable[[torch.Tensor], torch.Tensor]
"""Draws tokens, int64[B, n] in the target's ids, from logits over all its tokens [B, n, V].

Entry t stands for the token two places after t.
"""


@torch.inference_mode()
def chains(
    head: Head, tokens: torch.Tensor, hidden: list[torch.Tensor], vocab_size: int, depth: int, draw: Draw
) -> list[torch.Tensor]:
    """The first ``depth`` tokens that a head drafts behind every position of rows, int64[B, T - 1] each.

    tokens : int64[B, T]. hidden : [B, T, hidden size] of each of the head's layers. Entry s of the d-th stands for the
    token d + 2 places after s, as the one after s is the target's own; -1 where the rows end before.
    """
    drafts = []

    def drawn(logits: torch.Tensor) -> torch.Tensor:
        if head.draft_to_target is not None:
            drafted, logits = logits, torch.full((*logits.shape[:-1], vocab_size), -torch.inf)
            logits[..., head.draft_to_target] = drafted
        drafts.append(draw(logits))
        return drafts[-1]

    for _logits in unroll(head, tokens[:, 1:], head.combine(hidden)[:, :-1], depth, drawn):
        pass
    # What was drafted in step j stands at s + j for the chain that began at s.
    return [functional.pad(draft[:, step:], (0, step), value=-1) for step, draft in enumerate(drafts)]


def unroll(
    head: Head, next_tokens: torch.Tensor, features: torch.Tensor, num_steps: int, draw: Draw | None
) -> Iterator[torch.Tensor]:
    """Logits [B, n, Vd] of each step.

    next_tokens : int64[B, n], the token after each position. features : [B, n, H], the target's. draw : what the head
    reads in later steps; None for the text as it is. The first j positions of step j stand for nothing.
    """
    length = next_tokens.shape[1]
    positions = torch.arange(length)[None]
    cache = DynamicCache()
    for step in range(num_steps):
        mask = None if step == 0 else _reach(length, step)
        logits, features = head(next_tokens, features, positions, attention_mask=mask, past_key_values=cache)
        yield logits
        features = functional.pad(features[:, :-1], (0, 0, 1, 0))
        if draw is not None:
            next_tokens = functional.pad(draw(logits)[:, :-1], (1, 0))


def _reach(length: int, step: int) -> torch.Tensor:
    """Which keys of this step and those before it a position sees, bool[1, 1, length, (step + 1) * length]."""
    back = torch.arange(length)[:, None] - torch.arange(length)
    blocks = [back >= step] + [back == step - earlier for earlier in range(1, step + 1)]
    return torch.cat(blocks, dim=1)[None, None]


DEPTH = 4
"""Tokens of the chain that is measured."""


def acceptance(target: PreTrainedModel, head: Head, texts: Written) -> dict[str, Any]:
    """Share of chains whose first d tokens the target wrote too, for each d, and their sum: accepted tokens a pass.

    Under "most_probable" each token is the head's most probable one; under "same_noise", for sampled text only, it is
    drawn at the text's temperature with the noise the target drew with, as the engine does. O(depth * rows * length *
    V) for the noise.
    """
    hidden, _logits = read(target, texts.tokens, Tap(target, head.feature_layers))
    visible = texts.visible()
    figures: dict[str, Any] = {"temperature": texts.temperature}

    def agreement(draw: Draw, counted: npt.NDArray[np.bool_]) -> dict[str, Any]:
        drafts = chains(head, texts.tokens, hidden, target.config.vocab_size, DEPTH, draw)
        return _figures(texts.tokens, drafts, counted)

    figures["most_probable"] = agreement(_most_probable, visible)
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
