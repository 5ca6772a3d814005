"""Train the bundled model: ``python -m benchmarks.training.model --out DIR``, about 40 minutes on a CPU.

Phase 1 trains on the standard library. Phase 2 trains the model to avoid loops and extends the context to 2,048 tokens.
The schedule depends on the step only, and the order of the data on the seed. DIR receives the model after each phase
and the list of training files with their hashes (``CORPUS.json``). Whoever distributes the model must also include the
licence and notices of these files, as in the directory of the bundled model.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import platform
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.nn import functional
from torch.optim import AdamW, Muon, Optimizer
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

from benchmarks.training.corpus import (
    END_OF_TEXT,
    END_OF_TEXT_ID,
    ROLES,
    SPECIAL_TOKENS,
    Prefixes,
    SourceFile,
    TokenStream,
    held_out_documents,
    standard_library,
    training_documents,
)
from benchmarks.training.measure import bits_per_byte, looped_tokens, write

VOCABULARY_SIZE = 4096
MAX_POSITIONS = 2048

# A turn is its role's token and its text; the assistant's turn ends with end-of-text, the model's only stop signal.
CHAT_TEMPLATE = """\
{%- for message in messages -%}
{%- if message['role'] not in ['system', 'user', 'assistant'] -%}
{{- raise_exception('Roles are system, user and assistant, got ' ~ message['role']) -}}
{%- endif -%}
{{- '<|' ~ message['role'] ~ '|>' ~ message['content'] -}}
{%- if message['role'] == 'assistant' -%}{{- '<|endoftext|>' -}}{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}
"""


def model_config() -> LlamaConfig:
    """Return the model's configuration: 5.4 million parameters, so that float16 weights take less than 11 MB."""
    return LlamaConfig(
        vocab_size=VOCABULARY_SIZE,
        hidden_size=256,
        intermediate_size=688,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=MAX_POSITIONS,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=END_OF_TEXT_ID,
        pad_token_id=END_OF_TEXT_ID,
        attn_implementation="sdpa",
    )


def train_tokenizer(texts: Iterable[str]) -> Tokenizer:
    """Train a byte-level BPE tokenizer that splits text as GPT-2 does; every digit is a token. Decoding is lossless."""
    tokenizer = Tokenizer(models.BPE())
    # Numbers of many digits would each be a rare token, or a run of the same token: both invite loops.
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY_SIZE,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def save_model(model: LlamaForCausalLM, tokenizer: Tokenizer, out: Path) -> None:
    """Write a Hugging Face model directory with float16 weights."""
    half = LlamaForCausalLM(model.config).half()
    half.load_state_dict(model.state_dict())
    half.generation_config = GenerationConfig(eos_token_id=END_OF_TEXT_ID, pad_token_id=END_OF_TEXT_ID)
    half.save_pretrained(out)
    # Stored in two bytes, computed in four: on a CPU that is faster, and a plain `from_pretrained` then does it.
    config = json.loads((out / "config.json").read_text())
    (out / "config.json").write_text(json.dumps({**config, "dtype": "float32"}, indent=2) + "\n")
    tokenizer.save(str(out / "tokenizer.json"))
    (out / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    described = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END_OF_TEXT,
        "pad_token": END_OF_TEXT,
        "additional_special_tokens": list(ROLES.values()),
        "add_bos_token": False,
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": MAX_POSITIONS,
    }
    (out / "tokenizer_config.json").write_text(json.dumps(described, indent=2) + "\n")


def write_record(files: Sequence[SourceFile], out: Path) -> None:
    """Write ``CORPUS.json``, the list of training files with their hashes."""
    record = {
        "source": "Python standard library",
        "python": platform.python_version(),
        "files": [
            {
                "path": file.path,
                "sha256": hashlib.sha256(file.text.encode()).hexdigest(),
                "bytes": len(file.text.encode()),
                "held_out": file.held_out,
            }
            for file in files
        ],
    }
    # One file a line: a change of the corpus is then readable in a diff.
    text = json.dumps(record, separators=(",", ":")).replace('{"path"', '\n{"path"')
    (out / "CORPUS.json").write_text(text + "\n")


# Unlikelihood training (Welleck et al. 2019, "Neural Text Generation with Unlikelihood Training", section 5.2) lets the
# model write greedily, finds what it repeated, and lowers the probability of exactly those tokens, next to ordinary
# training on the corpus. The paper penalises repeated n-grams; source code repeats those for good reasons, so here only
# loops count.
NUM_ROLLOUTS = 10
UNLIKELIHOOD_WEIGHT = 3.0


def rollout_tokens(step: int, num_steps: int) -> int:
    """Return the number of tokens to generate in a step: few at first, when loops start early, and more later."""
    return 64 if 2 * step < num_steps else 160


def unlikelihood_loss(model: LlamaForCausalLM, tokens: torch.Tensor, prefix_length: int) -> tuple[torch.Tensor, float]:
    """Return the unlikelihood loss of generated text, and the share of its tokens that lie in loops.

    The loss is the sum of ``-log(1 - p)`` over the tokens in loops, divided by the number of generated tokens.
    """
    written = tokens[:, prefix_length:].numpy()
    looped = np.zeros(written.shape, np.bool_)
    for row, mask in zip(written, looped, strict=True):
        # What follows end-of-text is never seen by anyone.
        end = int(np.argmax(row == END_OF_TEXT_ID)) if END_OF_TEXT_ID in row else len(row)
        mask[:end] = looped_tokens(row[:end])
    if not looped.any():
        return torch.zeros(()), 0.0
    logits = model(input_ids=tokens[:, :-1], use_cache=False).logits[:, prefix_length - 1 :].float()
    log_p = -functional.cross_entropy(logits.transpose(1, 2), tokens[:, prefix_length:], reduction="none")
    # log(1 - p), finite for p near 1.
    penalty = -torch.log((1 - log_p.exp()).clamp_min(1e-5))
    return penalty[torch.from_numpy(looped)].sum() / looped.size, float(looped.mean())


ROW_LENGTH = 512
STEP_TOKENS = 2048
"""The number of tokens per step in phase 1."""
PEAK_LEARNING_RATE = 3e-3
WARM_UP_STEPS = 40
FINISH_SHARE = 0.15
"""The learning rate at the start of phase 2, as a share of the peak. It then falls linearly to zero."""
FINISH_ROW_LENGTH = 2048


def learning_rate(step: int, num_steps: int) -> float:
    """Return the learning rate of a step in phase 1.

    It rises over ``WARM_UP_STEPS``, stays constant, and falls linearly over the last 55 % to the rate at which phase 2
    starts.
    """
    rise = (step + 1) / WARM_UP_STEPS
    left = min(1.0, (num_steps - step) / (0.55 * num_steps))
    return PEAK_LEARNING_RATE * min(rise, FINISH_SHARE + (1 - FINISH_SHARE) * left)


def make_optimizers(model: torch.nn.Module, outer: str, decay: float, outer_decay: float) -> list[Optimizer]:
    """Return Muon (Jordan et al. 2024) for the inner matrices, and AdamW for norms and matrices named ``outer``.

    Muon's updates are scaled to the size of AdamW's (Liu et al. 2025, section 2.2), so both use the same learning rate.
    """
    named = dict(model.named_parameters())
    matrices = [name for name, weight in named.items() if weight.ndim == 2 and outer not in name]
    rest = [weight for name, weight in named.items() if name not in matrices]
    return [
        Muon([named[name] for name in matrices], weight_decay=decay, adjust_lr_fn="match_rms_adamw"),
        AdamW(rest, betas=(0.9, 0.95), weight_decay=outer_decay),
    ]


def take_step(optimizers: Sequence[Optimizer], rate: float) -> None:
    """Update all parameters from their gradients with the learning rate ``rate``."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()


def train(args: argparse.Namespace) -> None:
    """Train the tokenizer and the model on the standard library, and write the model directories."""
    files = standard_library()
    tokenizer = train_tokenizer(file.text for file in files if not file.held_out)
    documents, held_out = training_documents(files, tokenizer), held_out_documents(files, tokenizer)
    model = LlamaForCausalLM(model_config())
    optimizers, started = make_optimizers(model, "embed", 0.1, 0.01), time.monotonic()
    # Another seed in phase 2: phase 1 has not finished its second epoch, and its order must not simply go on.
    first = TokenStream(documents, args.seed, STEP_TOKENS)
    second = TokenStream(documents, args.seed + 1, FINISH_ROW_LENGTH)
    prefixes = Prefixes(documents, args.seed, NUM_ROLLOUTS)
    model.train()

    def backward(stream: TokenStream, step: int, row_length: int) -> float:
        inputs, targets = stream.batch(step, row_length)
        logits = model(input_ids=inputs, use_cache=False).logits
        loss = functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
        model.zero_grad()
        torch.autograd.backward(loss)
        return loss.item()

    def update(rate: float, **said: object) -> None:
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        take_step(optimizers, rate)
        log(args.out, **said, seconds=round(time.monotonic() - started))

    def save(name: str) -> None:
        save_model(model, tokenizer, args.out / name)
        log(args.out, saved=name, held_out_bits_per_byte=round(bits_per_byte(model, *held_out, ROW_LENGTH), 4))

    for step in range(args.steps):
        loss = backward(first, step, ROW_LENGTH)
        update(learning_rate(step, args.steps), phase=1, step=step + 1, loss=round(loss, 3))
    save("pretrained")
    for step in range(args.finish_steps):
        loss = backward(second, step, FINISH_ROW_LENGTH if step % 2 else ROW_LENGTH)
        start = prefixes.batch(step)
        length = start.shape[1] + rollout_tokens(step, args.finish_steps)
        unlikelihood, share = unlikelihood_loss(model, write(model, start, length), start.shape[1])
        if unlikelihood.requires_grad:
            torch.autograd.backward(UNLIKELIHOOD_WEIGHT * unlikelihood)
        rate = PEAK_LEARNING_RATE * FINISH_SHARE * (1 - step / args.finish_steps)
        update(rate, phase=2, step=step + 1, loss=round(loss, 3), looped=round(share, 3))
    save("model")
    write_record(files, args.out / "model")


def log(out: Path, **record: object) -> None:
    """Print a JSON line and append it to ``training.jsonl``."""
    line = json.dumps(record)
    print(line, flush=True)
    with (out / "training.jsonl").open("a") as file:
        file.write(line + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.training.model", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="directory for the models and the log")
    parser.add_argument("--steps", type=int, default=950, help="number of training steps in phase 1")
    parser.add_argument("--finish-steps", type=int, default=210, help="number of training steps in phase 2")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(2)
    torch.manual_seed(args.seed)
    args.out.mkdir(parents=True, exist_ok=True)
    train(args)


if __name__ == "__main__":
    main()
