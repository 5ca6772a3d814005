"""Phase 2 of training: unlearn loops, learn positions up to 2,048.

A small model that is decoded greedily soon says the same thing again and again. Unlikelihood training (Welleck et al.
2019, "Neural Text Generation with Unlikelihood Training", section 5.2) lets the model write greedily, finds what it
repeated, and lowers the probability of exactly those tokens, next to ordinary training on the corpus. The paper
penalises repeated n-grams; source code repeats those for good reasons, so here only loops count (``loops.py``).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch.nn import functional
from transformers import DynamicCache, LlamaForCausalLM

from ssd.bundled.training.loops import repeated_tokens
from ssd.bundled.training.model_format import END_OF_TEXT_ID, SPECIAL_TOKENS

NUM_ROLLOUTS = 10
MAX_PREFIX_TOKENS = 48
UNLIKELIHOOD_WEIGHT = 3.0


class Prefixes:
    """Openings from which the model is let to write: any place of the corpus, or a question of a conversation."""

    def __init__(self, documents: list[npt.NDArray[np.int64]], seed: int, num_rows: int = NUM_ROLLOUTS) -> None:
        self._documents = documents
        self._seed = seed
        self._num_rows = num_rows
        assistant = SPECIAL_TOKENS.index("<|assistant|>")
        self._questions = [document[: np.argmax(document == assistant) + 1] for document in documents]
        self._questions = [question for question in self._questions if 1 < len(question) <= MAX_PREFIX_TOKENS]
        self._weights = np.array([len(document) for document in documents], np.float64)
        self._weights /= self._weights.sum()

    def batch(self, step: int) -> torch.Tensor:
        """Prefixes of one length, int64[num_rows, length]; a function of the seed and the step."""
        random = np.random.default_rng([self._seed, 1, step])
        length = int(random.integers(4, MAX_PREFIX_TOKENS + 1))
        # Every fourth step asks questions, cut at the front to the same length.
        if step % 4 == 3:
            fitting = [question for question in self._questions if len(question) >= length]
            if len(fitting) >= self._num_rows:
                chosen = random.choice(len(fitting), self._num_rows, replace=False)
                return torch.from_numpy(np.stack([fitting[i][-length:] for i in chosen]))
        rows: list[npt.NDArray[np.int64]] = []
        while len(rows) < self._num_rows:
            document = self._documents[random.choice(len(self._documents), p=self._weights)]
            if len(document) > length:
                start = int(random.integers(0, len(document) - length))
                rows.append(document[start : start + length])
        return torch.from_numpy(np.stack(rows))


def rollout_tokens(step: int, num_steps: int) -> int:
    """Length of a rollout: short while loops come at once, long when they come late."""
    return 64 if 2 * step < num_steps else 160


@torch.no_grad()
def greedy_rollouts(model: LlamaForCausalLM, prefixes: torch.Tensor, num_tokens: int) -> torch.Tensor:
    """Prefixes and what the model writes after them, int64[rows, length + num_tokens]. End-of-text does not stop it."""
    cache = DynamicCache(config=model.config)
    tokens = inputs = prefixes
    for _ in range(num_tokens):
        logits = model(input_ids=inputs, past_key_values=cache, logits_to_keep=1).logits
        inputs = logits[:, -1].argmax(-1, keepdim=True)
        tokens = torch.cat([tokens, inputs], dim=1)
    return tokens


def unlikelihood_loss(model: LlamaForCausalLM, tokens: torch.Tensor, prefix_length: int) -> tuple[torch.Tensor, float]:
    """``-log(1 - p)`` of every looped token the model wrote, over the number of tokens it wrote; and their share."""
    written = tokens[:, prefix_length:].cpu().numpy()
    looped = np.zeros(written.shape, np.bool_)
    for row, mask in zip(written, looped, strict=True):
        # What follows end-of-text is never seen by anyone.
        end = int(np.argmax(row == END_OF_TEXT_ID)) if END_OF_TEXT_ID in row else len(row)
        mask[:end] = repeated_tokens(row[:end])
    if not looped.any():
        return torch.zeros((), device=tokens.device), 0.0
    logits = model(input_ids=tokens[:, :-1], use_cache=False).logits[:, prefix_length - 1 :].float()
    log_p = -functional.cross_entropy(logits.transpose(1, 2), tokens[:, prefix_length:], reduction="none")
    # log(1 - p), finite for p near 1.
    penalty = -torch.log((1 - log_p.exp()).clamp_min(1e-5))
    return penalty[torch.from_numpy(looped).to(tokens.device)].sum() / looped.size, float(looped.mean())
