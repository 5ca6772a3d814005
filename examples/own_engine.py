"""Use the retrieval cache as a library in an inference engine of your own: ``python -m examples.own_engine``."""

from __future__ import annotations

import torch
from transformers import AutoModelForCausalLM

from ssd import RetrievalCache, TextCodec
from ssd.bundled import MODEL_PATH


def main() -> None:
    """Decode two requests as one batch, twice, and print the number of forward passes and whether outputs are equal."""
    codec = TextCodec.load(str(MODEL_PATH))
    model = AutoModelForCausalLM.from_pretrained(MODEL_PATH, dtype=torch.float32).eval()
    prompts = {"a": "def read_lines(path):\n", "b": "class Node:\n    def __init__(self"}
    outputs = []
    with RetrievalCache(vocab_size=codec.vocab_size, max_length=512, fingerprint=codec.fingerprint) as cache:
        for attempt in ("first time", "second time"):
            texts = {name: codec.encode_prompt(prompt) for name, prompt in prompts.items()}
            outputs.append(texts)
            for name, text in texts.items():
                cache.start(name, text)
            passes = 0
            while running := [name for name, text in texts.items() if len(text) < 64]:
                drafts = cache.speculate(running)
                new = [verify(model, texts[name], draft) for name, draft in zip(running, drafts, strict=True)]
                passes += 1
                cache.extend(running, new)
                for name, tokens in zip(running, new, strict=True):
                    texts[name] += tokens
            for name in texts:
                cache.finish(name)
            print(f"{attempt}: {passes} passes")
        same = all(outputs[0][name][:64] == outputs[1][name][:64] for name in prompts)
        print(f"equal outputs: {same}; {cache.stats().num_cached_tokens} tokens are cached")


@torch.inference_mode()
def verify(model: torch.nn.Module, text: list[int], draft: list[int]) -> list[int]:
    """Return the accepted tokens of a draft and the target's next token. An engine does this with its KV cache."""
    best = model(torch.tensor([text + draft])).logits[0, len(text) - 1 :].argmax(-1).tolist()
    num_accepted = next((i for i, token in enumerate(draft) if token != best[i]), len(draft))
    return [*draft[:num_accepted], best[num_accepted]]


if __name__ == "__main__":
    main()
