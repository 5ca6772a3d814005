"""What this engine does on this machine with a model, for who reads logs without it: what passes and steps cost, and
requests decoded with drafts and without.

``python -m ssd.engine.measured costs|log MODEL < ASKED``

A program of its own, because who asks loads no torch. Standard input is JSON. Ends stdout with one JSON line; where it
cannot, that line is ``{"error": ...}`` and the status is 2.

- costs, batch 1 and greedy: passes of several widths, plain steps, what a step that may draft takes beside its pass,
  and what the target's own candidates add to drafts that come from text alone: a replay has no model that could say
  them. ``prompts``: lists of token ids, none for text of this file; ``context``, most tokens of each; ``rounds``, times
  that every width is timed; ``tokens``, generated for each prompt.
- log, one request at a time, both ways by default but for the drafts, by turns, each temperature with an empty cache at
  first; every output is compared. ``prompts`` in the order they came; ``lengths``, most tokens of each answer;
  ``temperatures``; ``minutes``, after which no request is begun; ``fingerprint``, of the tokenizer that made the ids;
  ``draft_limit``; ``warm``, cache directories to search; ``learns``, whether answers are learned.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
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
from ssd.errors import ConfigError, EngineError, SSDError
from ssd.model.loading.load_target import load_model, model_limit, open_target
from ssd.model.loading.threads import tune_threads
from ssd.model.target import Target
from ssd.retrieval.cache_manager import CacheManager
from ssd.text.codec import TextCodec

Asked = Mapping[str, Any]

WIDTHS = (1, 2, 3, 4, 6, 8, 12, 17, 25, 33, 49, 65)
_MOST_PROMPTS = 64
_SIZES = {"context": 256, "rounds": 30, "tokens": 48}

WAYS = ("none", "ssd")
_COMPARED_TO_THE_BIT = 8
"""Requests of each temperature that are answered twice more, with log-probabilities, which would change the times."""
_SAID_EVERY_S = 10.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m ssd.engine.measured")
    parser.add_argument("what", choices=("costs", "log"))
    parser.add_argument("model", help="Hugging Face directory or id")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--device", default="auto")
    options = parser.parse_args(arguments)
    try:
        codec, asked = TextCodec.load(options.model), json.load(sys.stdin)
        found = _Costs(codec, asked) if options.what == "costs" else _Log(codec, asked, options.model)
        _say(f"reading the weights of {options.model}")
        model = load_model(options.model, dtype=options.dtype, device=options.device)
        result = {
            "measured": "step-costs" if options.what == "costs" else "log",
            "model": Path(options.model).name,
            "device": torch.cuda.get_device_name(model.device) if model.device.type == "cuda" else model.device.type,
            "dtype": str(model.dtype).removeprefix("torch."),
            **found.of(model),
            "threads": torch.get_num_threads(),
        }
    except (SSDError, OSError, ValueError) as error:
        print(json.dumps({"error": " ".join(str(error).split())}))
        return 2
    print(json.dumps(result))
    return 0


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


def _open(
    model: PreTrainedModel, codec: TextCodec, drafter: str, draft: DraftConfig, room: int, caches: CacheManager | None
) -> Engine:
    target = open_target(
        model, num_slots=1, max_length=room, max_draft_tokens=draft.num_speculative_tokens,
        keeps_top=draft.recycling and drafter == "ssd",
    )  # fmt: skip
    engine = Engine(
        target, drafter=make_drafter(drafter, draft), codec=codec, caches=caches, config=EngineConfig(max_num_seqs=1),
        draft=draft,
    )  # fmt: skip
    engine.warm_up()
    return engine


def _complete(engine: Engine, request: Request) -> tuple[dict[str, Any], list[tuple[float, int, int]]]:
    """What was said, with log-probabilities where they are asked for, and what it took; and of each step but the first,
    which computes the prompt too, seconds, drafted tokens and tokens put out."""
    said, steps, first_s = list[Any](), list[tuple[float, int, int]](), 0.0
    began = time.perf_counter()
    engine.submit(request)
    while engine.has_work():
        before = time.perf_counter()
        outputs = engine.step()
        now = time.perf_counter()
        for output in outputs:
            if first_s and output.draft is not None:
                steps.append((now - before, output.draft.num_drafted, len(output.token_ids)))
            first_s = first_s or now - began
            if output.error is not None or output.refusal is not None:
                raise EngineError(f"a request failed: {output.error or output.refusal}")
            said += output.token_ids if output.logprobs is None else map(str, output.logprobs)
            stats = output.stats
    took = {
        "said": said, "seconds": time.perf_counter() - began, "first_s": first_s, "tokens": stats.num_output_tokens,
        "passes": stats.num_verify_steps, "drafted": stats.num_draft_tokens, "accepted": stats.num_accepted_tokens,
    }  # fmt: skip
    return took, steps


class _Costs:
    """Costs in plain steps, times in milliseconds."""

    def __init__(self, codec: TextCodec, asked: Asked) -> None:
        """Raises ConfigError where the prompts cannot be used."""
        self._codec = codec
        self._sizes = {name: int(asked.get(name, size)) for name, size in _SIZES.items()}
        self._prompts = self._usable(asked.get("prompts"))

    def _usable(self, given: Any) -> list[list[int]]:
        """Those to decode from, their ends; of this program's own text where none are given."""
        most = self._sizes["context"]
        if given is None:
            text = self._codec.encode_prompt(Path(__file__).read_text())
            return [text[begin : begin + most] for begin in range(0, len(text) - 2, most)][:4]
        try:
            prompts = [[int(token_id) for token_id in prompt][-most:] for prompt in given]
        except (ValueError, TypeError) as error:
            raise ConfigError(f"prompts must be a list of lists of token ids ({error})") from error
        prompts = [prompt for prompt in prompts if len(prompt) >= 2][:_MOST_PROMPTS]
        if not prompts or any(not 0 <= token_id < self._codec.vocab_size for each in prompts for token_id in each):
            raise ConfigError("prompts of two tokens or more are needed, of the model's own tokenizer")
        return prompts

    def of(self, model: PreTrainedModel) -> dict[str, Any]:
        """The result. Raises ConfigError where too little was said."""
        seconds, steps = self._time(model)
        if not all(each and sum(tokens for _, _, tokens in each) for each in steps):
            raise ConfigError("too little was generated to be timed: give more tokens or other prompts")
        plain, looked_up, full = (
            (np.array([took for took, _, _ in each]), sum(tokens for _, _, tokens in each)) for each in steps
        )

        def over(way: tuple[npt.NDArray[np.float64], int]) -> float:
            """How many times faster tokens come than plainly."""
            return float(plain[0].sum() * way[1] / (way[0].sum() * plain[1]))

        ratios = np.maximum.accumulate(np.median(seconds / seconds[:, :1], axis=0))
        pass_s, step_s = float(np.median(seconds[:, 0])), median(plain[0].tolist())
        expected = pass_s * np.interp([1 + drafted for _, drafted, _ in steps[1]], WIDTHS, ratios)
        beside = float(np.median(looked_up[0] - expected))
        costs = 1.0 + (ratios - 1.0) * min(1.0, pass_s / step_s)
        return {
            "parameters": self._sizes,
            "requests": len(self._prompts),
            "widths": list(WIDTHS),
            "ms": [round(took * 1e3, 4) for took in np.median(seconds, axis=0)],
            "costs": [round(cost, 4) for cost in costs],
            "step_ms": round(step_s * 1e3, 4),
            "overhead": round(max(0.0, (beside - (step_s - pass_s)) / step_s), 4),
            "recycling": round(max(0.0, over(full) - over(looked_up)), 4),
        }

    def _time(self, model: PreTrainedModel) -> tuple[npt.NDArray[np.float64], list[list[tuple[float, int, int]]]]:
        """Seconds of passes, float64[rounds, widths]; steps of plain decoding, of drafts that are looked up, and of all
        that is on by default. Everything in turn, so that a machine that slows down slows all."""
        longest, number = max(self._prompts, key=len), len(self._prompts)
        room = len(longest) + max(max(WIDTHS), self._sizes["tokens"]) + 1
        bare = open_target(model, num_slots=1, max_length=room, max_draft_tokens=max(WIDTHS))
        tune_threads(bare)
        text = decode(bare, longest, max(WIDTHS) + 1)
        sampling = SamplingParams(max_tokens=self._sizes["tokens"], temperature=0.0, ignore_eos=True)
        seconds, steps = [], list[list[tuple[float, int, int]]]([[], [], []])
        with ExitStack() as resources:
            known = [
                None,
                *(resources.enter_context(CacheManager(CacheConfig(), self._codec.fingerprint)) for _ in "ab"),
            ]
            ways = (("none", DraftConfig()), ("ssd", DraftConfig(recycling=False)), ("ssd", DraftConfig()))
            engines = [
                _open(model, self._codec, name, draft, room, caches)
                for (name, draft), caches in zip(ways, known, strict=True)
            ]
            for turn, prompt in enumerate(self._prompts):
                _say(f"timing steps, request {turn + 1} of {number}")
                seconds.append(time_rounds(bare, text, WIDTHS, -(-self._sizes["rounds"] // number))[0])
                request = Request(request_id="measured", prompt_token_ids=tuple(prompt), sampling=sampling)
                for place in range(len(engines)):
                    way = (turn + place) % len(engines)
                    steps[way] += _complete(engines[way], request)[1]
        return np.concatenate(seconds), steps


class _Log:
    """Every request of every temperature: tokens, passes and seconds both ways."""

    def __init__(self, codec: TextCodec, asked: Asked, name: str) -> None:
        """``name`` : the model's. Raises ConfigError where the ids are another tokenizer's."""
        if asked["fingerprint"] != codec.fingerprint:
            raise ConfigError(f"the log was read with another tokenizer than that of {name}: give --tokenizer {name}")
        self._codec, self._asked, self._name = codec, asked, name
        self._draft = DraftConfig(num_speculative_tokens=int(asked["draft_limit"]))

    def of(self, model: PreTrainedModel) -> dict[str, Any]:
        """The result. Raises ConfigError where nothing can be decoded."""
        asked, limit = self._asked, model_limit(model)
        requests = [
            (number, tuple(prompt), length)
            for number, (prompt, length) in enumerate(zip(asked["prompts"], asked["lengths"], strict=True))
            if limit is None or len(prompt) + length < limit
        ]
        if not requests:
            raise ConfigError(f"no prompt of the log fits into the context of {self._name}, {limit} tokens")
        room = max(len(prompt) + length for _, prompt, length in requests) + 1
        tune_threads(open_target(model, num_slots=1, max_length=room, max_draft_tokens=1))
        return {
            "too_long": len(asked["prompts"]) - len(requests),
            "temperatures": [self._decode(model, requests, float(each), room) for each in asked["temperatures"]],
        }

    def _decode(
        self,
        model: PreTrainedModel,
        requests: Sequence[tuple[int, tuple[int, ...], int]],
        temperature: float,
        room: int,
    ) -> dict[str, Any]:
        asked = self._asked
        most_s = 60.0 * float(asked["minutes"]) / len(asked["temperatures"])
        with CacheManager(CacheConfig(), self._codec.fingerprint) as caches:
            for directory in asked["warm"]:
                caches.add_prebuilt_directory(Path(directory))
            engines = {
                name: _open(model, self._codec, name, self._draft, room, known)
                for name, known in zip(WAYS, (None, caches), strict=True)
            }

            def answer(way: str, logprobs: int | None, number: int, prompt: tuple[int, ...], most: int) -> Any:
                sampling = SamplingParams(max_tokens=most, temperature=temperature, seed=number, logprobs=logprobs)
                request = Request(
                    request_id=f"{number} {logprobs}", prompt_token_ids=prompt, sampling=sampling, learn=asked["learns"]
                )
                return _complete(engines[way], request)[0]

            rows, began = list[dict[str, Any]](), time.monotonic()
            said = -_SAID_EVERY_S
            for place, request in enumerate(requests):
                now = time.monotonic() - began
                if now > most_s:
                    break
                if now - said >= _SAID_EVERY_S:
                    said = now
                    _say(f"decoding request {place + 1} of {len(requests)} at temperature {temperature:g}, both ways")
                ways = {way: answer(way, None, *request) for way in (WAYS if place % 2 else WAYS[::-1])}
                caches.flush()
                rows.append({"request": request[0], "same": ways["none"].pop("said") == ways["ssd"]["said"], **ways})
            of_bits = requests[: len(rows) : max(1, -(-len(rows) // _COMPARED_TO_THE_BIT))]
            other_bits = sum(answer("none", 0, *each)["said"] != answer("ssd", 0, *each)["said"] for each in of_bits)
        return {"temperature": temperature, "requests": rows, "bits_compared": len(of_bits), "bits_differ": other_bits}


def _say(what: str) -> None:
    print(what, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
