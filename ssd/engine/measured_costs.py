"""What steps of this engine cost on this machine, for who replays logs without it.

``python -m ssd.engine.measured_costs MODEL [--prompts FILE] [--rounds N] [--tokens N] ...``

A program of its own, because who replays loads no torch. Batch 1, greedy. Measured are passes of several widths, plain
steps, what a step that may draft takes beside its pass, and what the target's own candidates add to drafts that come
from text alone: a replay has no model that could say them. ``--prompts`` : JSON, a list of lists of token ids, some of
the requests to be replayed; ``-`` is standard input. Ends stdout with one JSON line; where it cannot, that line is
``{"error": ...}`` and the status is 2.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import PreTrainedModel

from ssd.config import CacheConfig, DraftConfig, EngineConfig, SamplingParams
from ssd.drafting import make_drafter
from ssd.engine.engine import Engine
from ssd.engine.request import Request
from ssd.errors import ConfigError, SSDError
from ssd.model.loading.load_target import load_model, open_target
from ssd.model.loading.threads import settle_threads
from ssd.model.target import Target
from ssd.retrieval.cache import CacheSet
from ssd.text.codec import TextCodec


def decode(target: Target, prompt: Sequence[int], num_tokens: int) -> npt.NDArray[np.int64]:
    """int64[num_tokens], the last token of the prompt and what follows it greedily, end of text or not.

    Slot 0 then holds the prompt but for that token.
    """
    target.prefill([0], np.array([prompt[:-1]], np.int64), [len(prompt) - 1])
    tokens = [prompt[-1]]
    while len(tokens) < num_tokens:
        logits = target.forward([0], np.array([tokens[-1:]], np.int64), [1]).logits
        tokens.append(int(logits[0, 0].argmax()))
    target.rollback(0, len(prompt) - 1)
    return np.array(tokens, np.int64)


def time_rounds(
    target: Target, text: npt.NDArray[np.int64], widths: Sequence[int], rounds: int
) -> tuple[npt.NDArray[np.float64], list[tuple[int, float]]]:
    """float64[rounds, widths], seconds of passes over the first so many tokens of ``text``, which `decode` gave.

    A round times every width once, in random order, so that a machine that slows down slows all. A pass ends when the
    target's tokens are on the host.

    Also returns every choice that was not that of single steps: the width of its pass, and by how much its score led.
    """
    begin = target.length(0)
    random = np.random.default_rng(0)
    seconds = np.zeros((rounds + 1, len(widths)))
    others: list[tuple[int, float]] = []
    for number in range(rounds + 1):
        for column in random.permutation(len(widths)):
            width = widths[column]
            began = time.perf_counter()
            logits = target.forward([0], text[None, :width], [width]).logits
            chosen = logits[0].argmax(-1).cpu().numpy()
            seconds[number, column] = time.perf_counter() - began
            target.rollback(0, begin)
            for position in np.flatnonzero(chosen != text[1 : width + 1]):
                scores = logits[0, position].float()
                others.append((width, float(scores.max() - scores[int(text[position + 1])])))
    return seconds[1:], others  # the first round allocates


WIDTHS = (1, 2, 3, 4, 6, 8, 12, 17, 25, 33, 49, 65)
_MOST_PROMPTS = 64


@dataclass(slots=True)
class Timed:
    """One way to run the engine, over all prompts. ``steps`` : seconds and drafted tokens of each step but the first
    of a request, which computes its prompt too."""

    engine: Engine
    steps: list[tuple[float, int]] = field(default_factory=list)
    num_tokens: int = 0
    """That these steps put out."""

    def complete(self, prompt: Sequence[int], max_tokens: int) -> None:
        """Run one request, end of text or not."""
        sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
        self.engine.submit(Request(request_id="measured", prompt_token_ids=tuple(prompt), sampling=sampling))
        is_first = True
        while self.engine.has_work():
            began = time.perf_counter()
            outputs = self.engine.step()
            seconds = time.perf_counter() - began
            for output in outputs:
                if not is_first and output.draft is not None:
                    self.steps.append((seconds, output.draft.num_drafted))
                    self.num_tokens += len(output.token_ids)
                is_first = False

    def over(self, other: Timed) -> float:
        """How many times faster tokens come from another one."""
        ours, theirs = (sum(seconds for seconds, _ in timed.steps) for timed in (self, other))
        return ours * other.num_tokens / (theirs * self.num_tokens)


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; returns the exit status."""
    options = _parse(arguments)
    try:
        result = measure(options)
    except (SSDError, OSError) as error:
        print(json.dumps({"error": " ".join(str(error).split())}))
        return 2
    print(json.dumps(result))
    return 0


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Costs in plain steps, times in milliseconds. Raises SSDError where the model or the prompts cannot be used."""
    codec = TextCodec.load(options.model)
    prompts = _prompts(options.prompts, codec, options.context)
    _say(f"reading the weights of {options.model}")
    model = load_model(options.model, dtype=options.dtype, device=options.device)
    seconds, plain, looked_up, full = _time(model, codec, prompts, options)
    if not (plain.num_tokens and looked_up.num_tokens and full.num_tokens):
        raise ConfigError("too little was generated to be timed: give more --tokens or other --prompts")
    ratios = np.maximum.accumulate(np.median(seconds / seconds[:, :1], axis=0))
    pass_s, step_s = float(np.median(seconds[:, 0])), median(took for took, _ in plain.steps)
    expected = pass_s * np.interp([1 + drafted for _, drafted in looked_up.steps], WIDTHS, ratios)
    beside = float(np.median(np.array([took for took, _ in looked_up.steps]) - expected))
    costs = 1.0 + (ratios - 1.0) * min(1.0, pass_s / step_s)
    return {
        "measured": "step-costs",
        "model": Path(options.model).name,
        "device": torch.cuda.get_device_name(model.device) if model.device.type == "cuda" else model.device.type,
        "dtype": str(model.dtype).removeprefix("torch."),
        "threads": torch.get_num_threads(),
        "parameters": {key: getattr(options, key) for key in ("context", "rounds", "tokens")},
        "requests": len(prompts),
        "widths": list(WIDTHS),
        "ms": [round(took * 1e3, 4) for took in np.median(seconds, axis=0)],
        "costs": [round(cost, 4) for cost in costs],
        "step_ms": round(step_s * 1e3, 4),
        "overhead": round(max(0.0, (beside - (step_s - pass_s)) / step_s), 4),
        "recycling": round(max(0.0, plain.over(full) - plain.over(looked_up)), 4),
    }


def _time(
    model: PreTrainedModel, codec: TextCodec, prompts: Sequence[list[int]], options: argparse.Namespace
) -> tuple[npt.NDArray[np.float64], Timed, Timed, Timed]:
    """Seconds of passes, float64[rounds, widths]; steps of plain decoding, of drafts that are looked up, and of all
    that is on by default. Everything in turn, so that a machine that slows down slows all."""
    longest = max(prompts, key=len)
    room = len(longest) + max(max(WIDTHS), options.tokens) + 1
    bare = open_target(model, num_slots=1, max_length=room, max_draft_tokens=max(WIDTHS))
    settle_threads(bare)
    text = decode(bare, longest, max(WIDTHS) + 1)
    rounds = -(-options.rounds // len(prompts))
    seconds = []
    with ExitStack() as resources:
        first, second = (
            resources.enter_context(CacheSet(CacheConfig(), fingerprint=codec.fingerprint)) for _ in range(2)
        )
        plain = _way(model, codec, "none", DraftConfig(), room, None)
        looked_up = _way(model, codec, "ssd", DraftConfig(recycling=False), room, first)
        full = _way(model, codec, "ssd", DraftConfig(), room, second)
        for number, prompt in enumerate(prompts):
            _say(f"timing steps, request {number + 1} of {len(prompts)}")
            seconds.append(time_rounds(bare, text, WIDTHS, rounds)[0])
            ways = [plain, looked_up, full]
            for place in range(len(ways)):
                ways[(number + place) % len(ways)].complete(prompt, options.tokens)
    return np.concatenate(seconds), plain, looked_up, full


def _way(
    model: PreTrainedModel, codec: TextCodec, name: str, draft: DraftConfig, room: int, caches: CacheSet | None
) -> Timed:
    limit = draft.num_speculative_tokens
    target = open_target(
        model, num_slots=1, max_length=room, max_draft_tokens=limit, keeps_top=draft.recycling and name == "ssd"
    )
    drafter, config = make_drafter(name, draft), EngineConfig(max_num_seqs=1)
    engine = Engine(target, drafter=drafter, codec=codec, caches=caches, config=config, draft=draft)
    engine.warm_up()
    return Timed(engine)


def _prompts(path: str | None, codec: TextCodec, most_tokens: int) -> list[list[int]]:
    """Those to decode from, their ends; of this program's own text where none are given."""
    if path is None:
        text = codec.encode_prompt(Path(__file__).read_text())
        return [text[begin : begin + most_tokens] for begin in range(0, len(text) - 2, most_tokens)][:4]
    try:
        given = json.loads(sys.stdin.read() if path == "-" else Path(path).read_text())
        prompts = [[int(token_id) for token_id in prompt][-most_tokens:] for prompt in given]
    except (ValueError, TypeError) as error:
        raise ConfigError(f"--prompts must be a JSON list of lists of token ids ({error})") from error
    prompts = [prompt for prompt in prompts if len(prompt) >= 2][:_MOST_PROMPTS]
    if not prompts or any(not 0 <= token_id < codec.vocab_size for prompt in prompts for token_id in prompt):
        raise ConfigError("--prompts needs prompts of two tokens or more, of the model's own tokenizer")
    return prompts


def _say(what: str) -> None:
    print(what, file=sys.stderr, flush=True)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m ssd.engine.measured_costs", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("model", help="Hugging Face directory or id")
    parser.add_argument("--prompts", metavar="FILE", help="JSON, lists of token ids (default: text of its own)")
    parser.add_argument("--context", type=int, default=256, help="most tokens of a prompt (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=30, help="times that every width is timed (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=48, help="generated for each prompt (default: %(default)s)")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--device", default="auto")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
