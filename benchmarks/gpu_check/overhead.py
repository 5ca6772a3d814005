"""Speculation that gains nothing: is it ever slower than none?"""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from benchmarks import overhead
from benchmarks.decode.shapes import random_model
from benchmarks.gpu_check.memory import let_go
from benchmarks.gpu_check.scene import Found, Keep, Scene
from ssd.bundled import MODEL_PATH
from ssd.model.loading.load_target import load_model
from ssd.text.codec import TextCodec


def overhead_large(scene: Scene, keep: Keep) -> Found:
    """On the large shape: what random weights say at temperature 1 never comes again."""
    model = random_model(scene.sizes.large, dtype=scene.served_dtype, device=scene.device)
    # The prompts are numbers to it: those of the bundled tokenizer are in every vocabulary that is larger.
    return _overhead(scene, model, TextCodec.load(str(MODEL_PATH)), keep)


def overhead_small(scene: Scene, keep: Keep) -> Found:
    """On the small model, in float32, whose passes are so short that the host shows."""
    model = load_model(scene.model, dtype="float32", device=scene.device)
    return _overhead(scene, model, TextCodec.load(scene.model), keep)


def _overhead(scene: Scene, model: PreTrainedModel, codec: TextCodec, keep: Keep) -> Found:
    sizes = scene.sizes
    vocab_size = model.config.get_text_config().vocab_size
    found: Found = {"passed": True, "rows": []}
    for batch in sizes.overhead_batch:
        let_go(model.device)
        max_tokens = 32 if scene.device != "cpu" else 4
        for row in overhead.compare(model, codec, batch, sizes.pairs, max_tokens, most_id=vocab_size):
            found["rows"].append(row)
            found["passed"] &= not row["mismatches"] or model.dtype != torch.float32
            keep(found)
            print(
                f"  overhead, batch {batch:>2}, {row['traffic']}: tokens/s {row['tokens_ratio_p50']:.3f} "
                f"{row['tokens_ratio_95']}, first token {row['first_token_ratio_p50']:.3f}",
                flush=True,
            )
    return found
