"""Does our drafter work inside the installed vLLM? ``python -m benchmarks.vllm.check [v1|v2]``, by vLLM's own Python.

``make bench-vllm`` begins with it, so that an environment that cannot be used is not marked as ready. Says also which
of vLLM's hooks are missing.
"""

from __future__ import annotations

import sys

from benchmarks.vllm.engines import Engine
from ssd.bundled import MODEL_PATH
from ssd.integrations.vllm_hooks import V1_HOOKS, V2_HOOKS, missing
from ssd.text.codec import TextCodec

_TEXTS = ("def main(argv):\n    parser = ", "import os\nimport sys\n\ndef walk(", "import os\nimport sys\n\ndef walk(")
_MAX_TOKENS = 48


def check(runner: str) -> str:
    """The same requests twice; returns what was seen. Raises ValueError where it is not what it should be."""
    if lacks := missing(V1_HOOKS + V2_HOOKS):
        raise ValueError("; ".join(lacks))
    codec = TextCodec.load(str(MODEL_PATH))
    prompts = [codec.encode_prompt(text) for text in _TEXTS]
    engine = Engine(str(MODEL_PATH), "ssd", batch=2, dtype="float32", max_model_len=512, runner=runner)
    steps = []
    for _ in range(2):
        before = engine.drafting.num_row_steps
        outputs, _ = engine.complete(prompts, _MAX_TOKENS)
        steps.append(engine.drafting.num_row_steps - before)
    counters = engine.counters()["proposer"]
    engine.close()
    if outputs != [_plain(prompt) for prompt in prompts]:
        raise ValueError("outputs are not those of model.generate")
    if counters["num_failures"] or steps[1] * 2 > steps[0]:
        raise ValueError(f"{counters['num_failures']} failures; verify steps {steps[0]}, then {steps[1]}")
    return f"vLLM {runner} drafts with ours: verify steps {steps[0]}, then {steps[1]}"


def _plain(prompt: list[int]) -> list[int]:
    import torch  # late: it imports Triton, which is prepared for V2 before
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(MODEL_PATH, dtype=torch.float32)
    output = model.generate(torch.tensor([prompt]), max_new_tokens=_MAX_TOKENS, do_sample=False)
    tokens: list[int] = output[0, len(prompt) :].tolist()
    return tokens


if __name__ == "__main__":
    print(check(*sys.argv[1:] or ["v1"]))
    sys.exit(0)
