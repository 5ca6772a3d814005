"""Train the bundled model.

``python -m benchmarks.training.train --out DIR`` learns the standard library (phase 1), then unlearns loops and
stretches the context to 2,048 tokens (phase 2). Everything is scheduled by step; the order of the data
follows from the seed. A run that was stopped goes on from its last checkpoint when started again with ``--resume``.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from tokenizers import Tokenizer
from torch.nn import functional
from torch.optim import AdamW, Muon, Optimizer
from transformers import DynamicCache, LlamaForCausalLM

from benchmarks.training import corpus
from benchmarks.training.corpus import TokenStream, held_out_documents, training_documents
from benchmarks.training.evaluate import bits_per_byte, repeated_tokens
from benchmarks.training.model_format import END_OF_TEXT_ID, SPECIAL_TOKENS, model_config, save_model, train_tokenizer

# Unlikelihood training (Welleck et al. 2019, "Neural Text Generation with Unlikelihood Training", section 5.2) lets the
# model write greedily, finds what it repeated, and lowers the probability of exactly those tokens, next to ordinary
# training on the corpus. The paper penalises repeated n-grams; source code repeats those for good reasons, so here only
# loops count.
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


ROW_LENGTH = 512
PEAK_LEARNING_RATE = 3e-3
WARM_UP_STEPS = 40
FINISH_SHARE = 0.15
"""Learning rate at the start of phase 2, as a share of the peak; it falls in a line to zero."""
FINISH_ROW_LENGTH = 2048
CHECKPOINT_EVERY = 50


def learning_rate(step: int, num_steps: int) -> float:
    """Phase 1: rise over ``WARM_UP_STEPS``, stay, then fall in a line over the last 55 % to where phase 2 starts."""
    rise = (step + 1) / WARM_UP_STEPS
    left = min(1.0, (num_steps - step) / (0.55 * num_steps))
    return PEAK_LEARNING_RATE * min(rise, FINISH_SHARE + (1 - FINISH_SHARE) * left)


def make_optimizers(model: LlamaForCausalLM) -> list[Optimizer]:
    """Muon (Jordan et al. 2024) on every matrix but the embedding; AdamW on the embedding and the norms.

    Muon's updates are scaled to the size of AdamW's (Liu et al. 2025, section 2.2), so one learning rate serves both.
    """
    named = dict(model.named_parameters())
    matrices = [name for name, weight in named.items() if weight.ndim == 2 and "embed" not in name]
    rest = [weight for name, weight in named.items() if name not in matrices]
    return [
        Muon([named[name] for name in matrices], weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
        AdamW(rest, betas=(0.9, 0.95), weight_decay=0.01),
    ]


def take_step(optimizers: Sequence[Optimizer], rate: float) -> None:
    """Update every parameter from its gradient, at one learning rate."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()


def load_optimizers(optimizers: Sequence[Optimizer], state: dict[str, Any]) -> None:
    """Take up what a checkpoint keeps of them."""
    for optimizer, saved in zip(optimizers, state["optimizers"], strict=True):
        optimizer.load_state_dict(saved)


def pretrain(
    model: LlamaForCausalLM, tokenizer: Tokenizer, files: list[corpus.SourceFile], args: argparse.Namespace
) -> None:
    """Phase 1: plain next-token training. Leaves ``pretrain.pt`` in the output directory."""
    stream = TokenStream(training_documents(files, tokenizer), args.seed, args.step_tokens)
    held_out, held_out_bytes = held_out_documents(files, tokenizer)
    optimizers = make_optimizers(model)
    checkpoint = args.out / "pretrain.pt"
    done, seconds = 0, 0.0
    if args.resume and checkpoint.exists():
        state = torch.load(checkpoint, map_location=args.device)
        model.load_state_dict(state["model"])
        load_optimizers(optimizers, state)
        done, seconds = state["step"], state["seconds"]
    log(args.out, phase="pretrain", start=done, steps=args.steps, threads=args.threads, epoch=stream.tokens_per_epoch)
    started = time.monotonic() - seconds
    model.train()
    for step in range(done, args.steps):
        inputs, targets = (t.to(args.device) for t in stream.batch(step, ROW_LENGTH))
        logits = model(input_ids=inputs, use_cache=False).logits
        loss = functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
        model.zero_grad()
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        take_step(optimizers, learning_rate(step, args.steps))
        seconds = time.monotonic() - started
        if (step + 1) % 20 == 0:
            log(args.out, step=step + 1, loss=round(loss.item(), 3), seconds=round(seconds))
        if (step + 1) % CHECKPOINT_EVERY == 0 or step + 1 == args.steps:
            state = {"model": model.state_dict(), "optimizers": [each.state_dict() for each in optimizers]}
            save_checkpoint({**state, "step": step + 1, "seconds": seconds}, checkpoint)
            save_model(model, tokenizer, args.out / "pretrained")
            measured = bits_per_byte(model, held_out, held_out_bytes, ROW_LENGTH)
            log(args.out, step=step + 1, held_out_bits_per_byte=round(measured, 4))


def finish(
    model: LlamaForCausalLM, tokenizer: Tokenizer, files: list[corpus.SourceFile], args: argparse.Namespace
) -> None:
    """Phase 2: long rows of the corpus and, in every step, unlikelihood on loops the model has just written."""
    documents = training_documents(files, tokenizer)
    # Another seed: phase 1 has not finished its second epoch, and its order must not simply go on.
    stream = TokenStream(documents, args.seed + 1, FINISH_ROW_LENGTH)
    prefixes = Prefixes(documents, args.seed)
    held_out, held_out_bytes = held_out_documents(files, tokenizer)
    optimizers = make_optimizers(model)
    checkpoint = args.out / "finish.pt"
    state = torch.load(args.out / "pretrain.pt", map_location=args.device)
    done, seconds = 0, 0.0
    if args.resume and checkpoint.exists():
        state = torch.load(checkpoint, map_location=args.device)
        done, seconds = state["step"], state["seconds"]
    model.load_state_dict(state["model"])
    load_optimizers(optimizers, state)
    log(args.out, phase="finish", start=done, steps=args.finish_steps, threads=args.threads)
    started = time.monotonic() - seconds
    looped = []
    for step in range(done, args.finish_steps):
        row_length = FINISH_ROW_LENGTH if step % 2 else ROW_LENGTH
        inputs, targets = (t.to(args.device) for t in stream.batch(step, row_length))
        logits = model(input_ids=inputs, use_cache=False).logits
        likelihood = functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
        model.zero_grad()
        torch.autograd.backward(likelihood)
        start = prefixes.batch(step).to(args.device)
        written = greedy_rollouts(model, start, rollout_tokens(step, args.finish_steps))
        unlikelihood, share = unlikelihood_loss(model, written, start.shape[1])
        if unlikelihood.requires_grad:
            torch.autograd.backward(UNLIKELIHOOD_WEIGHT * unlikelihood)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        take_step(optimizers, PEAK_LEARNING_RATE * FINISH_SHARE * (1 - step / args.finish_steps))
        looped.append(share)
        seconds = time.monotonic() - started
        if (step + 1) % 10 == 0:
            recent = round(sum(looped[-10:]) / len(looped[-10:]), 3)
            log(args.out, step=step + 1, loss=round(likelihood.item(), 3), looped=recent, seconds=round(seconds))
        if (step + 1) % CHECKPOINT_EVERY == 0 or step + 1 == args.finish_steps:
            state = {"model": model.state_dict(), "optimizers": [each.state_dict() for each in optimizers]}
            save_checkpoint({**state, "step": step + 1, "seconds": seconds}, checkpoint)
            save_model(model, tokenizer, args.out / "model")
            measured = bits_per_byte(model, held_out, held_out_bytes, ROW_LENGTH)
            log(args.out, step=step + 1, held_out_bits_per_byte=round(measured, 4))


def save_checkpoint(state: dict[str, Any], path: Path) -> None:
    """Write beside the old checkpoint, then replace it: a stop at any time leaves a whole one."""
    new = path.with_suffix(".new")
    torch.save(state, new)
    new.replace(path)


def log(out: Path, **record: object) -> None:
    """One JSON line to the screen and to ``log.jsonl``."""
    line = json.dumps(record)
    print(line, flush=True)
    with (out / "log.jsonl").open("a") as file:
        file.write(line + "\n")


def parse_args() -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.training.train", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="directory for checkpoints and the finished model")
    parser.add_argument("--steps", type=int, default=950, help="steps of phase 1")
    parser.add_argument("--step-tokens", type=int, default=2048, help="tokens per step of phase 1")
    parser.add_argument("--finish-steps", type=int, default=210, help="steps of phase 2")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint in --out")
    return parser.parse_args()


def main() -> None:
    """Train, from the interpreter's own library to a model directory."""
    args = parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    args.out.mkdir(parents=True, exist_ok=True)
    files = corpus.standard_library()
    # Training it takes seconds and always gives the same vocabulary.
    tokenizer = train_tokenizer(file.text for file in files if not file.held_out)
    model = LlamaForCausalLM(model_config()).to(args.device)
    pretrain(model, tokenizer, files, args)
    finish(model, tokenizer, files, args)
    corpus.write_record(files, args.out / "model")


if __name__ == "__main__":
    main()
