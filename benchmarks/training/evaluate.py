"""Judge a model directory: ``python -m benchmarks.training.evaluate [DIR]``.

Prints samples and ends with one JSON line. Every output comes from one fixed set of prompts, alone in its batch.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from tokenizers import Tokenizer
from torch.nn import functional
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel

from benchmarks.training import corpus
from benchmarks.training.corpus import held_out_documents
from benchmarks.training.model_format import END_OF_TEXT_ID, MAX_POSITIONS, Message, render
from ssd.bundled import MODEL_PATH

# A small model decoded greedily soon repeats itself, and repeated text is what a retrieval drafter predicts best. The
# share in loops says how far a speed-up may be trusted; training uses the same definition to push loops away.
MAX_PERIOD = 32
"""Longest repeated unit that counts as a loop, in tokens."""
MIN_LOOP_TOKENS = 8
"""Shortest looped stretch, in tokens: keeps ``))))`` and dashed lines of a table from counting."""


def looped_tokens(token_ids: Sequence[int] | npt.NDArray[np.integer]) -> npt.NDArray[np.bool_]:
    """Mark the tokens of every stretch that is two or more whole copies of a unit of 1 to ``MAX_PERIOD`` tokens.

    Returns bool[n], True inside a loop, its first copy included. A stretch has at least ``MIN_LOOP_TOKENS`` tokens.
    """
    return _mark(np.asarray(token_ids), first_copy=True)


def repeated_tokens(token_ids: Sequence[int] | npt.NDArray[np.integer]) -> npt.NDArray[np.bool_]:
    """Like ``looped_tokens`` without the first copy: the tokens a model should not have produced."""
    return _mark(np.asarray(token_ids), first_copy=False)


def loop_share(token_ids: Sequence[int] | npt.NDArray[np.integer]) -> float:
    """Share of tokens inside loops; 0 for an empty text."""
    mask = looped_tokens(token_ids)
    return float(mask.mean()) if len(mask) else 0.0


def _mark(tokens: npt.NDArray[np.integer], *, first_copy: bool) -> npt.NDArray[np.bool_]:
    mask = np.zeros(len(tokens), np.bool_)
    for period in range(1, min(MAX_PERIOD, len(tokens) // 2) + 1):
        same = tokens[period:] == tokens[:-period]
        # Edges of the runs of True: a run [lo, hi) of `same` is the looped stretch [lo, hi + period) of the text.
        edges = np.flatnonzero(np.diff(np.concatenate([[0], same.astype(np.int8), [0]])))
        for lo, hi in zip(edges[::2], edges[1::2], strict=True):
            if hi - lo >= period and hi - lo + period >= MIN_LOOP_TOKENS:
                mask[lo if first_copy else lo + period : hi + period] = True
    return mask


MAX_NEW_TOKENS = 256

# No prompt ends in a space: in the vocabulary a space belongs to the word after it.
CODE_PROMPTS = (
    "import os\nimport",
    "from collections import",
    "def main():\n",
    "def fibonacci(n):\n",
    "def read_file(path):\n",
    "def __init__(self, name, value=None):\n",
    "class Stack:\n",
    "class Request(object):\n    def __init__(self, url):\n",
    "class ParseError(Exception):\n",
    "for i in range(",
    "for line in file:\n",
    "while True:\n",
    "try:\n    value = int(text)\nexcept",
    "with open(filename) as f:\n",
    "if __name__ == '__main__':\n",
    '    def close(self):\n        """Close the',
    '"""Utilities for',
    "# Copyright",
    "    return self.",
    "    raise ValueError(",
    "    def test_",
    "async def fetch(",
    "@property\ndef",
    "_cache = {}\n\ndef lookup(key):\n",
)
QUESTIONS = (
    "Write a Python function. Return the sum of two numbers.",
    "Write `is_empty`: Return True if the queue is empty.",
    "Write a function `read_lines`. Read all lines of a file and return them as a list.",
    "Write a Python function. Remove an item from the list.",
    'Complete this function:\ndef close(self):\n    """Close the connection."""',
    "Write `parse_header`: Parse a header line and return its name and value.",
    "Write a function `join`. Join two paths.",
    "How do I sort a list in Python?",
)


@dataclass(frozen=True, slots=True)
class Output:
    """What a model wrote for one prompt."""

    prompt: str
    token_ids: list[int]
    """Without the prompt and without end-of-text."""
    ended: bool
    """Whether the model ended the text itself."""


@torch.inference_mode()
def bits_per_byte(
    model: PreTrainedModel, documents: list[npt.NDArray[np.int64]], num_bytes: int, row_length: int
) -> float:
    """Cost of the held-out text, all documents end to end, cut into rows that are read without what came before."""
    tokens = torch.from_numpy(np.concatenate(documents)).to(model.device)
    training = model.training
    model.eval()
    nats = 0.0
    for start in range(0, len(tokens) - 1, row_length):
        row = tokens[start : start + row_length + 1]
        logits = model(input_ids=row[None, :-1], use_cache=False).logits[0].float()
        nats += functional.cross_entropy(logits, row[1:], reduction="sum").item()
    model.train(training)
    return nats / math.log(2) / num_bytes


def all_prompts() -> list[str]:
    """The fixed prompts, 24 openings of source text and 8 rendered questions."""
    questions = [render([Message("user", question)]) + "<|assistant|>" for question in QUESTIONS]
    return [*CODE_PROMPTS, *questions]


def write_outputs(model: PreTrainedModel, tokenizer: Tokenizer, config: GenerationConfig, seed: int) -> list[Output]:
    """Continue every fixed prompt."""
    torch.manual_seed(seed)
    outputs = []
    for prompt in all_prompts():
        ids = tokenizer.encode(prompt).ids
        inputs = torch.tensor([ids], device=model.device)
        new = model.generate(inputs, attention_mask=torch.ones_like(inputs), generation_config=config)[0, len(ids) :]
        ended = new[-1].item() == END_OF_TEXT_ID
        outputs.append(Output(prompt, new.tolist()[: len(new) - ended], ended))
    return outputs


def looped_share(texts: list[list[int]], num_tokens: int) -> float:
    """Share of tokens inside loops, counted over the first ``num_tokens`` of every text."""
    masks = [looped_tokens(np.array(text[:num_tokens], np.int64)) for text in texts]
    return sum(int(mask.sum()) for mask in masks) / max(1, sum(map(len, masks)))


def judge(model: PreTrainedModel, tokenizer: Tokenizer) -> tuple[dict[str, object], dict[str, list[Output]]]:
    """Every figure of the model card, and the outputs they were counted on."""
    model.eval()
    documents, num_bytes = held_out_documents(corpus.standard_library(), tokenizer)
    ends = {"max_new_tokens": MAX_NEW_TOKENS, "eos_token_id": END_OF_TEXT_ID, "pad_token_id": END_OF_TEXT_ID}
    greedy = GenerationConfig(do_sample=False, **ends)
    sampled = GenerationConfig(do_sample=True, temperature=0.7, top_p=0.9, top_k=0, **ends)
    outputs = {
        "greedy": write_outputs(model, tokenizer, greedy, seed=0),
        "sampled": write_outputs(model, tokenizer, sampled, seed=0),
    }
    figures: dict[str, object] = {
        f"held_out_bits_per_byte_{length}": round(bits_per_byte(model, documents, num_bytes, length), 4)
        for length in (512, 1024, MAX_POSITIONS)
    }
    # What people wrote, cut into pieces of the same lengths: the share that is no fault.
    text = np.concatenate(documents).tolist()
    for length in (64, MAX_NEW_TOKENS):
        pieces = [text[i : i + length] for i in range(0, len(text), length)]
        figures[f"human_loop_share_{length}"] = round(looped_share(pieces, length), 4)
    for mode, texts in outputs.items():
        questions = texts[len(CODE_PROMPTS) :]
        for length in (64, MAX_NEW_TOKENS):
            figures[f"{mode}_loop_share_{length}"] = round(looped_share([t.token_ids for t in texts], length), 4)
        figures[f"{mode}_ended_share"] = round(sum(t.ended for t in texts) / len(texts), 4)
        figures[f"{mode}_ended_share_questions"] = round(sum(t.ended for t in questions) / len(questions), 4)
    return figures, outputs


def main() -> None:
    """Print outputs and figures."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.training.evaluate", description=__doc__)
    parser.add_argument("directory", nargs="?", type=Path, default=MODEL_PATH)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    tokenizer = Tokenizer.from_file(str(args.directory / "tokenizer.json"))
    model = AutoModelForCausalLM.from_pretrained(args.directory, dtype=torch.float32)
    figures, outputs = judge(model, tokenizer)
    for mode, texts in outputs.items():
        for output in texts:
            share = looped_share([output.token_ids], MAX_NEW_TOKENS)
            print(f"==== {mode}, ended: {output.ended}, looped: {share:.2f}\n{output.prompt}", end="")
            print(f"[[{tokenizer.decode(output.token_ids, skip_special_tokens=False)}]]\n")
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
