"""Use our drafts with transformers' ``generate``: ``python -m examples.transformers_generate``."""

from __future__ import annotations

import torch
from transformers import AutoModelForCausalLM

from ssd import CacheConfig, CacheManager, TextCodec
from ssd.bundled import MODEL_PATH
from ssd.integrations.transformers import generate


def main() -> None:
    """Generate twice with a cache, and print whether the output equals the library's own, and the number of passes."""
    codec = TextCodec.load(str(MODEL_PATH))
    model = AutoModelForCausalLM.from_pretrained(MODEL_PATH, dtype=torch.float32).eval()
    passes = []
    model.register_forward_pre_hook(lambda *_: passes.append(1))
    input_ids = torch.tensor([codec.encode_prompt("class Node:\n    def __init__(self")])
    plain = model.generate(input_ids, max_new_tokens=48, do_sample=False)
    print(f"the library alone: {len(passes)} passes")
    with CacheManager(CacheConfig(), codec.fingerprint) as caches:
        for attempt in ("first time", "second time"):
            passes.clear()
            output = generate(model, input_ids, cache=caches.get(), max_new_tokens=48, do_sample=False)
            print(f"{attempt}: {len(passes)} passes, the same output: {torch.equal(output, plain)}")


if __name__ == "__main__":
    main()
