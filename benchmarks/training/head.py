"""Train an EAGLE-3 head for the bundled model: ``python -m benchmarks.training.head --out DIR``, half an hour on a CPU.

The model generates text, and the head learns to predict this text. The result depends only on the seed and the number
of steps. DIR becomes a directory for ``--draft-head``. During training, the head reads its own output, as it does when
it drafts: "training-time test" (arXiv 2503.01840, section 3). ``python -m benchmarks.contenders`` measures its effect.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch.nn import functional
from transformers import AutoModelForCausalLM, DynamicCache, LlamaConfig, PreTrainedModel

from benchmarks.training.corpus import Prefixes, TokenStream, standard_library, training_documents
from benchmarks.training.measure import write
from benchmarks.training.model import log, make_optimizers, take_step
from ssd.bundled import MODEL_PATH
from ssd.model.heads.networks import Eagle3Head
from ssd.model.layers.hidden_states import HiddenStateTap

STEP_WEIGHT = 0.8
"""The weight of a step's loss relative to the weight of the previous step."""


class Eagle3Training:
    """A new EAGLE-3 head for a Llama target, initialized from the target's last layer, and its loss."""

    def __init__(
        self,
        target: PreTrainedModel,
        draft_ids: torch.Tensor,
        feature_layers: tuple[int, ...],
        intermediate_size: int,
    ) -> None:
        """Create the head. ``draft_ids``, int64[Vd] in ascending order, are the target's tokens that it can draft."""
        config = LlamaConfig.from_dict(target.config.to_dict())
        config.num_hidden_layers = 1
        config.intermediate_size = intermediate_size
        config.tie_word_embeddings = False
        config._attn_implementation = "sdpa"
        self.head = Eagle3Head(config, target.get_input_embeddings(), feature_layers, draft_vocab_size=len(draft_ids))
        self.head.draft_to_target = draft_ids
        self._draft_ids = draft_ids
        self._begin(target)

    @torch.no_grad()
    def _begin(self, target: PreTrainedModel) -> None:
        head, layer = self.head, target.model.layers[-1]
        size = head.feature_size
        # Features begin as the last of the hidden states; what the others add is learned.
        for weight in (head.fc.weight, *(getattr(head.midlayer.self_attn, f"{name}_proj").weight for name in "qkv")):
            torch.nn.init.normal_(weight, std=0.02)
        head.fc.weight[:, -size:] += torch.eye(size)
        for name in "qkv":
            weight = getattr(head.midlayer.self_attn, f"{name}_proj").weight
            weight[:, size:] += getattr(layer.self_attn, f"{name}_proj").weight
        head.midlayer.self_attn.o_proj.weight.copy_(layer.self_attn.o_proj.weight)
        inner = head.config.intermediate_size
        head.midlayer.mlp.gate_proj.weight.copy_(layer.mlp.gate_proj.weight[:inner])
        head.midlayer.mlp.up_proj.weight.copy_(layer.mlp.up_proj.weight[:inner])
        head.midlayer.mlp.down_proj.weight.copy_(layer.mlp.down_proj.weight[:, :inner])
        head.midlayer.hidden_norm.load_state_dict(layer.input_layernorm.state_dict())
        head.midlayer.post_attention_layernorm.load_state_dict(layer.post_attention_layernorm.state_dict())
        head.norm.load_state_dict(target.model.norm.state_dict())
        head.lm_head.weight.copy_(target.get_output_embeddings().weight[self._draft_ids])

    def loss(self, tokens: torch.Tensor, hidden: list[torch.Tensor], logits: torch.Tensor, depth: int) -> torch.Tensor:
        """Return the cross-entropy to the target over the draft vocabulary; later steps have less weight."""
        features = self.head.combine([states[:, :-1] for states in hidden])
        wanted = torch.softmax(logits[:, 1:, self._draft_ids], -1)
        total, weights = torch.zeros(()), 0.0
        for step, drafted in enumerate(unroll(self.head, tokens[:, 1:], features, depth)):
            weight = STEP_WEIGHT**step
            distance = functional.cross_entropy(drafted[:, step:].flatten(0, 1), wanted[:, step:].flatten(0, 1))
            total = total + weight * distance
            weights += weight
        return total / weights

    def files(self) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        """Return the config and the tensors in the layout of the EAGLE repository."""
        head = self.head
        kept = (
            *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
            *("head_dim", "hidden_act", "rms_norm_eps", "rope_parameters", "max_position_embeddings", "vocab_size"),
            *("attention_bias", "bos_token_id", "eos_token_id", "pad_token_id"),
        )
        described = head.config.to_dict()
        config = {
            "architectures": ["LlamaForCausalLMEagle3"],
            "model_type": "llama",
            **{name: described[name] for name in kept},
            "draft_vocab_size": len(self._draft_ids),
            "eagle_config": {
                # Counted from the first layer, 0, by what comes out of it.
                "eagle_aux_hidden_state_layer_ids": [layer - 1 for layer in head.feature_layers],
                "use_aux_hidden_state": True,
            },
        }
        tensors = dict(head.state_dict())
        ids = tensors.pop("draft_to_target")  # is published as what to add to a drafted id, and which are drafted
        tensors["d2t"] = ids - torch.arange(len(ids))
        tensors["t2d"] = torch.zeros(described["vocab_size"], dtype=torch.bool).index_fill_(0, ids, True)
        return config, tensors


@torch.no_grad()
def read(model: PreTrainedModel, tokens: torch.Tensor, tap: HiddenStateTap) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Run the model over rows of tokens; return the recorded hidden states, [rows, length, H] each, and all logits."""
    with tap.recording() as hidden:
        logits: torch.Tensor = model(input_ids=tokens, use_cache=False).logits
    return hidden, logits


def unroll(
    head: Eagle3Head, next_tokens: torch.Tensor, features: torch.Tensor, num_steps: int
) -> Iterator[torch.Tensor]:
    """Run the head for several steps on its own output, and yield the logits [B, n, Vd] of each step.

    ``next_tokens`` is the token after each position, int64[B, n]; ``features`` are the target's, [B, n, H]. The first j
    positions of step j are meaningless.
    """
    length = next_tokens.shape[1]
    positions = torch.arange(length)[None]
    cache = DynamicCache()
    for step in range(num_steps):
        mask = None if step == 0 else _reach(length, step)
        logits, features = head(next_tokens, features, positions, attention_mask=mask, past_key_values=cache)
        yield logits
        features = functional.pad(features[:, :-1], (0, 0, 1, 0))


def _reach(length: int, step: int) -> torch.Tensor:
    back = torch.arange(length)[:, None] - torch.arange(length)
    blocks = [back >= step] + [back == step - earlier for earlier in range(1, step + 1)]
    return torch.cat(blocks, dim=1)[None, None]


ROW_LENGTH = 256
STEP_ROWS = 8
LONG_ROW_LENGTH = 1024
LONG_EVERY = 8
"""The interval of steps that train on long rows of the corpus, with depth 1, because contexts in serving are long."""
TRAINED_DEPTH = 3
"""The number of steps that the head is unrolled for in training."""
WARM_UP_STEPS = 20
LEARNING_RATE = 3e-3
LAYERS = (2, 4, 6)
"""The layers of the target whose hidden states the head reads."""
DRAFT_VOCAB_SIZE, INTERMEDIATE_SIZE = 2048, 512
WRITTEN_ROWS = 256
WRITTEN_TEMPERATURES = (0.7, 0.0, 1.0, 0.7)
"""The temperatures of the batches of generated text. The last batch answers questions."""
LOG_EVERY = 20


def train(
    training: Eagle3Training, target: PreTrainedModel, written: torch.Tensor, stream: TokenStream, args: Any
) -> dict[str, Any]:
    """Train the head, and return figures about the training for the log.

    ``written`` is text that the target generated, int64[rows, ROW_LENGTH]. Every eighth step uses long rows of the
    corpus; a third of the other steps uses short rows of the corpus, the rest use ``written``.
    """
    optimizers = make_optimizers(training.head, "lm_head", 0.01, 0.0)
    tap = HiddenStateTap(target, training.head.feature_layers)
    training.head.train()
    started = time.monotonic()
    order = np.random.default_rng([args.seed, 2])
    losses, deal = list[float](), list[int]()
    for step in range(args.steps):
        depth = TRAINED_DEPTH
        if step % LONG_EVERY == LONG_EVERY - 1:
            tokens, depth = stream.batch(step, LONG_ROW_LENGTH)[0], 1
        elif step % 3 == 2:
            tokens = stream.batch(step, ROW_LENGTH)[0]
        else:
            if len(deal) < STEP_ROWS:
                deal = order.permutation(len(written)).tolist()
            tokens = written[[deal.pop() for _ in range(STEP_ROWS)]]
        hidden, logits = read(target, tokens, tap)
        loss = training.loss(tokens, hidden, logits, depth)
        training.head.zero_grad()
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(training.head.parameters(), 1.0)
        left = min(1.0, (args.steps - step) / (0.6 * args.steps))
        take_step(optimizers, LEARNING_RATE * min((step + 1) / WARM_UP_STEPS, left))
        losses.append(loss.item())
        if step % LOG_EVERY == LOG_EVERY - 1:
            seconds, mean = round(time.monotonic() - started), round(float(np.mean(losses[-LOG_EVERY:])), 3)
            log(args.out, step=step + 1, of=args.steps, loss=mean, seconds=seconds)
    training.head.eval()
    return {
        "tokens": args.steps * STEP_ROWS * ROW_LENGTH,
        "seconds": round(time.monotonic() - started),
        "first_loss": round(float(np.mean(losses[:10])), 3),
        "last_loss": round(float(np.mean(losses[-10:])), 3),
    }


def frequent_tokens(written: torch.Tensor, count: int) -> torch.Tensor:
    """Return the most frequent tokens of the generated text, int64[count] in ascending order."""
    counts = torch.bincount(written.flatten(), minlength=count)
    share = counts.sort(descending=True).values[:count].sum() / counts.sum()
    print(f"{count} tokens are {float(share):.1%} of the text", flush=True)
    return counts.argsort(descending=True, stable=True)[:count].sort().values


def save(training: Eagle3Training, out: Path) -> int:
    """Write ``config.json`` and ``model.safetensors`` in float16; return the size of both files in bytes."""
    config, tensors = training.files()
    kept = {name: (each.half() if each.is_floating_point() else each).contiguous() for name, each in tensors.items()}
    save_file(kept, out / "model.safetensors", metadata={"format": "pt"})
    (out / "config.json").write_text(json.dumps({**config, "dtype": "float16"}, indent=2) + "\n")
    return sum((out / name).stat().st_size for name in ("config.json", "model.safetensors"))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.training.head", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="directory to write the draft head to")
    parser.add_argument("--steps", type=int, default=420)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(2)
    torch.manual_seed(args.seed)
    args.out.mkdir(parents=True, exist_ok=True)
    target = AutoModelForCausalLM.from_pretrained(MODEL_PATH, dtype=torch.float32).eval().requires_grad_(False)
    tokenizer = Tokenizer.from_file(str(MODEL_PATH / "tokenizer.json"))
    documents = training_documents(standard_library(), tokenizer)
    started = time.monotonic()
    prefixes = Prefixes(documents, args.seed, WRITTEN_ROWS)
    written = torch.cat(
        [
            write(target, prefixes.batch(step), ROW_LENGTH, temperature, 1000 * args.seed + step)
            for step, temperature in enumerate(WRITTEN_TEMPERATURES)
        ]
    )
    log(args.out, written=written.numel(), seconds=round(time.monotonic() - started))
    training = Eagle3Training(target, frequent_tokens(written, DRAFT_VOCAB_SIZE), LAYERS, INTERMEDIATE_SIZE)
    stream = TokenStream(documents, args.seed, STEP_ROWS * ROW_LENGTH)
    done = train(training, target, written, stream, args)
    num_bytes = save(training, args.out)
    versions = {"torch": torch.__version__, "python": platform.python_version()}
    log(args.out, kind="eagle3", steps=args.steps, seed=args.seed, **done, bytes=num_bytes, **versions)


if __name__ == "__main__":
    main()
