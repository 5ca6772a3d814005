"""Requests decoded with drafts and without by turns, every output compared: what drafts bring, measured.

``python -m ssd.engine.measured_log MODEL < REQUESTS``

A program of its own, because who asks loads no torch. Standard input is JSON: ``prompts``, lists of token ids in the
order they came; ``lengths``, most tokens of each answer; ``temperatures``; ``minutes``, after which no request is
begun; ``fingerprint``, of the tokenizer that made the ids; ``draft_limit``; ``warm``, cache directories to search;
``learns``, whether answers are learned. One request at a time, both ways by default
but for the drafts, each temperature with an empty cache at first. Which way goes first alternates. Ends stdout with one
JSON line; where it cannot, that line is ``{"error": ...}`` and the status is 2.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from ssd.config import CacheConfig, DraftConfig, EngineConfig, SamplingParams
from ssd.drafting import make_drafter
from ssd.engine.engine import Engine
from ssd.engine.request import Request
from ssd.errors import ConfigError, EngineError, SSDError
from ssd.model.loading.load_target import load_model, model_limit, open_target
from ssd.model.loading.threads import settle_threads
from ssd.retrieval.cache import CacheSet
from ssd.text.codec import TextCodec

WAYS = ("none", "ssd")
_COMPARED_TO_THE_BIT = 8
"""Requests of each temperature that are answered twice more, with log-probabilities, which would change the times."""
_SAID_EVERY_S = 10.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m ssd.engine.measured_log")
    parser.add_argument("model", help="Hugging Face directory or id")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--device", default="auto")
    options = parser.parse_args(arguments)
    try:
        result = measure(options.model, json.load(sys.stdin), dtype=options.dtype, device=options.device)
    except (SSDError, OSError, ValueError) as error:
        print(json.dumps({"error": " ".join(str(error).split())}))
        return 2
    print(json.dumps(result))
    return 0


def measure(name: str, asked: dict[str, Any], *, dtype: str = "auto", device: str = "auto") -> dict[str, Any]:
    """Every request of every temperature: tokens, passes and seconds both ways. Raises SSDError."""
    codec = TextCodec.load(name)
    if asked["fingerprint"] != codec.fingerprint:
        raise ConfigError(f"the log was read with another tokenizer than that of {name}: give --tokenizer {name}")
    _say(f"reading the weights of {name}")
    model = load_model(name, dtype=dtype, device=device)
    limit = model_limit(model)
    requests = [
        (number, tuple(prompt), length)
        for number, (prompt, length) in enumerate(zip(asked["prompts"], asked["lengths"], strict=True))
        if limit is None or len(prompt) + length < limit
    ]
    if not requests:
        raise ConfigError(f"no prompt of the log fits into the context of {name}, {limit} tokens")
    room = max(len(prompt) + length for _, prompt, length in requests) + 1
    settle_threads(open_target(model, num_slots=1, max_length=room, max_draft_tokens=1))
    seconds = 60.0 * float(asked["minutes"]) / len(asked["temperatures"])
    draft = DraftConfig(num_speculative_tokens=int(asked["draft_limit"]))
    return {
        "measured": "log",
        "model": Path(name).name,
        "device": torch.cuda.get_device_name(model.device) if model.device.type == "cuda" else model.device.type,
        "dtype": str(model.dtype).removeprefix("torch."),
        "threads": torch.get_num_threads(),
        "too_long": len(asked["prompts"]) - len(requests),
        "temperatures": [
            _decode(model, codec, requests, float(temperature), room, draft, seconds, asked["warm"], asked["learns"])
            for temperature in asked["temperatures"]
        ],
    }


def _decode(
    model: PreTrainedModel,
    codec: TextCodec,
    requests: Sequence[tuple[int, tuple[int, ...], int]],
    temperature: float,
    room: int,
    draft: DraftConfig,
    most_s: float,
    warm: Sequence[str],
    learns: bool,
) -> dict[str, Any]:
    with CacheSet(CacheConfig(), codec.fingerprint) as caches:
        for directory in warm:
            caches.add_static_directory(Path(directory))
        engines = {
            "none": _engine(model, codec, "none", draft, room, None),
            "ssd": _engine(model, codec, "ssd", draft, room, caches),
        }
        done, rows, began = (
            list[Callable[[str, int | None], dict[str, Any]]](),
            list[dict[str, Any]](),
            time.monotonic(),
        )
        said = began
        for place, (number, prompt, length) in enumerate(requests):
            if time.monotonic() - began > most_s:
                break
            if time.monotonic() - said > _SAID_EVERY_S or not place:
                said = time.monotonic()
                _say(f"decoding request {place + 1} of {len(requests)} at temperature {temperature:g}, both ways")

            def answer(
                way: str,
                logprobs: int | None,
                number: int = number,
                prompt: tuple[int, ...] = prompt,
                most: int = length,
            ) -> dict[str, Any]:
                sampling = SamplingParams(max_tokens=most, temperature=temperature, seed=number, logprobs=logprobs)
                request = Request(
                    request_id=f"{number} {logprobs}", prompt_token_ids=prompt, sampling=sampling, learn=learns
                )
                return _complete(engines[way], request)

            ways = {way: answer(way, None) for way in (WAYS if place % 2 else WAYS[::-1])}
            caches.flush()
            done.append(answer)
            rows.append({"request": number, "same": ways["none"].pop("said") == ways["ssd"]["said"], **ways})
        of_bits = done[:: max(1, -(-len(done) // _COMPARED_TO_THE_BIT))]
        other_bits = sum(answer("none", 0)["said"] != answer("ssd", 0)["said"] for answer in of_bits)
    return {"temperature": temperature, "requests": rows, "bits_compared": len(of_bits), "bits_differ": other_bits}


def _engine(
    model: PreTrainedModel, codec: TextCodec, drafter: str, draft: DraftConfig, room: int, caches: CacheSet | None
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


def _complete(engine: Engine, request: Request) -> dict[str, Any]:
    """What was said, with log-probabilities where they are asked for, and what it took."""
    said, first_s = list[Any](), 0.0
    began = time.perf_counter()
    engine.submit(request)
    while engine.has_work():
        for output in engine.step():
            first_s = first_s or time.perf_counter() - began
            if output.error is not None or output.refusal is not None:
                raise EngineError(f"a request failed: {output.error or output.refusal}")
            said += output.token_ids if output.logprobs is None else map(str, output.logprobs)
            stats = output.stats
    return {
        "said": said, "seconds": time.perf_counter() - began, "first_s": first_s, "tokens": stats.num_output_tokens,
        "passes": stats.num_verify_steps, "drafted": stats.num_draft_tokens, "accepted": stats.num_accepted_tokens,
    }  # fmt: skip


def _say(what: str) -> None:
    print(what, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
