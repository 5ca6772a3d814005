"""What heads learn from: text that the model wrote itself, and the corpus that it learned from.

A head has to guess what the target says in its own texts, so these are most of what it reads; the corpus adds long
contexts, which are slow to write. What a head should say is the target's own distribution in both.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from tokenizers import Tokenizer
from transformers import DynamicCache, PreTrainedModel

from ssd.bundled.training.corpus import SourceFile, conversations
from ssd.bundled.training.data import held_out_documents
from ssd.bundled.training.finish import Prefixes
from ssd.bundled.training.model_format import END_OF_TEXT_ID, render
from ssd.model.layers.tap import Tap

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


@torch.inference_mode()
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
