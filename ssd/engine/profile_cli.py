"""Command line that profiles a model on this machine: latency of forward passes, decoding with and without drafts.

``python -m ssd.engine.profile_cli costs|log MODEL < SETTINGS``

It is a separate program so that its caller need not import torch. The settings are JSON on standard input. The last
line of standard output is a JSON object; on failure it is ``{"error": ...}``, and the exit status is 2.

``costs`` decodes greedily at batch size 1. It measures forward passes of several widths, steps without drafts, the
drafting time per step, and the gain from token recycling, which cannot be known without the model. Settings:

- ``prompts``: lists of token ids; by default the text of this file.
- ``context``: the maximum number of tokens of each prompt.
- ``rounds``: how often every width is timed.
- ``tokens``: the number of tokens generated for each prompt.

``log`` decodes logged requests one at a time, with and without drafts, and compares the outputs. Each temperature
starts with an empty cache. Settings:

- ``prompts``: lists of token ids in the order of arrival.
- ``lengths``: the maximum number of output tokens of each prompt.
- ``temperatures``: the sampling temperatures.
- ``minutes``: the time after which no request is started.
- ``fingerprint``: the fingerprint of the tokenizer that made the token ids.
- ``draft_limit``: the maximum draft length.
- ``warm``: prebuilt cache directories to search.
- ``learns``: whether outputs are added to the cache.
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
from ssd.model.sampling.sampler import greedy_tokens
from ssd.model.target import Target
from ssd.retrieval.cache_manager import CacheManager
from ssd.text.codec import TextCodec

Settings = Mapping[str, Any]

WIDTHS = (1, 2, 3, 4, 6, 8, 12, 17, 25, 33, 49, 65)
_MAX_PROMPTS = 64
_SIZES = {"context": 256, "rounds": 30, "tokens": 48}

VARIANTS = ("none", "ssd")
_NUM_BIT_COMPARED = 8
"""The number of requests per temperature that are decoded again with log-probabilities.

Equal log-probabilities show that forward passes with and without drafts are bit-identical.
"""
_REPORT_EVERY_S = 10.0


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m ssd.engine.profile_cli")
    parser.add_argument("what", choices=("costs", "log"))
    parser.add_argument("model", help="Hugging Face directory or id")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--device", default="auto")
    options = parser.parse_args(arguments)
    try:
        codec, settings = TextCodec.load(options.model), json.load(sys.stdin)
        profile = (
            _CostProfile(codec, settings) if options.what == "costs" else _LogProfile(codec, settings, options.model)
        )
        _report(f"reading the weights of {options.model}")
        model = load_model(options.model, dtype=options.dtype, device=options.device)
        result = {
            "measured": "step-costs" if options.what == "costs" else "log",
            "model": Path(options.model).name,
            "device": torch.cuda.get_device_name(model.device) if model.device.type == "cuda" else model.device.type,
            "dtype": str(model.dtype).removeprefix("torch."),
            **profile.measure(model),
            "threads": torch.get_num_threads(),
        }
    except (SSDError, OSError, ValueError) as error:
        print(json.dumps({"error": " ".join(str(error).split())}))
        return 2
    print(json.dumps(result))
    return 0


def decode(target: Target, prompt: Sequence[int], num_tokens: int) -> npt.NDArray[np.int64]:
    """Decode ``num_tokens`` - 1 tokens greedily in slot 0; return the last prompt token and the decoded tokens.

    An end-of-text token does not end the output. Afterwards slot 0 holds the KV cache of the prompt without its last
    token.
    """
    target.prefill([0], np.array([prompt[:-1]], np.int64), [len(prompt) - 1])
    tokens = [prompt[-1]]
    while len(tokens) < num_tokens:
        logits = target.forward([0], np.array([tokens[-1:]], np.int64), [1]).logits
        tokens.append(int(greedy_tokens(logits[0, 0])))
    target.rollback(0, len(prompt) - 1)
    return np.array(tokens, np.int64)


def time_rounds(
    target: Target, text: npt.NDArray[np.int64], widths: Sequence[int], rounds: int
) -> tuple[npt.NDArray[np.float64], list[tuple[int, float]]]:
    """Measure the seconds of forward passes over the first tokens of a text, for several numbers of tokens (widths).

    ``text`` is the result of `decode`. A round measures every width once, in random order, so that a slow period of the
    machine affects all widths alike. A pass ends when the target's tokens are on the host.

    Returns:
        The seconds, float64[rounds, widths]; and a list with an entry for each token that the target predicts
        differently than in ``text``: the width of the pass, and the logit of the predicted token minus that of the
        token in ``text``.
    """
    begin = target.length(0)
    random = np.random.default_rng(0)
    seconds = np.zeros((rounds + 1, len(widths)))
    others: list[tuple[int, float]] = []
    for number in range(rounds + 1):
        for column in random.permutation(len(widths)):
            width = widths[column]
            started = time.perf_counter()
            logits = target.forward([0], text[None, :width], [width]).logits
            chosen = greedy_tokens(logits[0])
            seconds[number, column] = time.perf_counter() - started
            target.rollback(0, begin)
            for position in np.flatnonzero(chosen != text[1 : width + 1]):
                scores = logits[0, position].float()
                others.append((width, float(scores.max() - scores[int(text[position + 1])])))
    return seconds[1:], others  # the first round allocates


def _open_engine(
    model: PreTrainedModel, codec: TextCodec, drafter: str, draft: DraftConfig, room: int, caches: CacheManager | None
) -> Engine:
    target = open_target(
        model,
        num_slots=1,
        max_length=room,
        max_draft_tokens=draft.num_speculative_tokens,
        keeps_top=draft.recycling and drafter == "ssd",
    )
    engine = Engine(
        target,
        drafter=make_drafter(drafter, draft),
        codec=codec,
        caches=caches,
        config=EngineConfig(max_num_seqs=1),
        draft=draft,
    )
    engine.warm_up()
    return engine


def _complete(engine: Engine, request: Request) -> tuple[dict[str, Any], list[tuple[float, int, int]]]:
    """Run one request; return a record of its output, times and counts, and the list of its decoding steps.

    A decoding step is a tuple (seconds, draft tokens, output tokens).
    """
    items, steps, first_s = list[Any](), list[tuple[float, int, int]](), 0.0
    started = time.perf_counter()
    engine.submit(request)
    while engine.has_work():
        before = time.perf_counter()
        outputs = engine.step()
        now = time.perf_counter()
        for output in outputs:
            if first_s and output.draft is not None:
                steps.append((now - before, output.draft.num_drafted, len(output.token_ids)))
            first_s = first_s or now - started
            if output.error is not None or output.refusal is not None:
                raise EngineError(f"a request failed: {output.error or output.refusal}")
            items += output.token_ids if output.logprobs is None else map(str, output.logprobs)
            stats = output.stats
    took = {
        "said": items,
        "seconds": time.perf_counter() - started,
        "first_s": first_s,
        "tokens": stats.num_output_tokens,
        "passes": stats.num_verify_steps,
        "drafted": stats.num_draft_tokens,
        "accepted": stats.num_accepted_tokens,
    }
    return took, steps


class _CostProfile:
    """Implements ``profile_cli costs``, which measures how much longer a forward pass with more tokens takes.

    It also measures the drafting time, and the gain from token recycling.
    """

    def __init__(self, codec: TextCodec, settings: Settings) -> None:
        self._codec = codec
        self._sizes = {name: int(settings.get(name, size)) for name, size in _SIZES.items()}
        self._prompts = self._check_prompts(settings.get("prompts"))

    def _check_prompts(self, given: Any) -> list[list[int]]:
        max_tokens = self._sizes["context"]
        if given is None:
            text = self._codec.encode_prompt(Path(__file__).read_text())
            return [text[begin : begin + max_tokens] for begin in range(0, len(text) - 2, max_tokens)][:4]
        try:
            prompts = [[int(token_id) for token_id in prompt][-max_tokens:] for prompt in given]
        except (ValueError, TypeError) as error:
            raise ConfigError(f"prompts must be a list of lists of token ids ({error})") from error
        prompts = [prompt for prompt in prompts if len(prompt) >= 2][:_MAX_PROMPTS]
        if not prompts or any(not 0 <= token_id < self._codec.vocab_size for each in prompts for token_id in each):
            raise ConfigError(
                "prompts must contain a prompt of at least two tokens, and only token ids within "
                f"0..{self._codec.vocab_size - 1}"
            )
        return prompts

    def measure(self, model: PreTrainedModel) -> dict[str, Any]:
        seconds, steps = self._time(model)
        if not all(each and sum(tokens for _, _, tokens in each) for each in steps):
            raise ConfigError('too few tokens were generated for a measurement: raise "tokens", or give other prompts')
        plain, looked_up, full = (
            (np.array([took for took, _, _ in each]), sum(tokens for _, _, tokens in each)) for each in steps
        )

        def speed_up(variant: tuple[npt.NDArray[np.float64], int]) -> float:
            return float(plain[0].sum() * variant[1] / (variant[0].sum() * plain[1]))

        ratios = np.maximum.accumulate(np.median(seconds / seconds[:, :1], axis=0))
        pass_s, step_s = float(np.median(seconds[:, 0])), median(plain[0].tolist())
        expected = pass_s * np.interp([1 + drafted for _, drafted, _ in steps[1]], WIDTHS, ratios)
        drafting_s = float(np.median(looked_up[0] - expected))
        costs = 1.0 + (ratios - 1.0) * min(1.0, pass_s / step_s)
        return {
            "parameters": self._sizes,
            "requests": len(self._prompts),
            "widths": list(WIDTHS),
            "ms": [round(took * 1e3, 4) for took in np.median(seconds, axis=0)],
            "costs": [round(cost, 4) for cost in costs],
            "step_ms": round(step_s * 1e3, 4),
            "overhead": round(max(0.0, (drafting_s - (step_s - pass_s)) / step_s), 4),
            "recycling": round(max(0.0, speed_up(full) - speed_up(looked_up)), 4),
        }

    def _time(self, model: PreTrainedModel) -> tuple[npt.NDArray[np.float64], list[list[tuple[float, int, int]]]]:
        """Measure forward passes of all widths, alternately with the decoding steps of three engines.

        Returns:
            The seconds of forward passes, float64[rounds, widths]; and the decoding steps of an engine without drafts,
            of one that drafts from retrieval alone, and of one that drafts from retrieval and token recycling.
        """
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
            variants = (("none", DraftConfig()), ("ssd", DraftConfig(recycling=False)), ("ssd", DraftConfig()))
            engines = [
                _open_engine(model, self._codec, name, draft, room, caches)
                for (name, draft), caches in zip(variants, known, strict=True)
            ]
            for index, prompt in enumerate(self._prompts):
                _report(f"timing steps, request {index + 1} of {number}")
                seconds.append(time_rounds(bare, text, WIDTHS, -(-self._sizes["rounds"] // number))[0])
                request = Request(request_id="measured", prompt_token_ids=tuple(prompt), sampling=sampling)
                for place in range(len(engines)):
                    variant = (index + place) % len(engines)
                    steps[variant] += _complete(engines[variant], request)[1]
        return np.concatenate(seconds), steps


class _LogProfile:
    """Implements ``profile_cli log``, which decodes logged requests with and without drafts and measures the times."""

    def __init__(self, codec: TextCodec, settings: Settings, name: str) -> None:
        if settings["fingerprint"] != codec.fingerprint:
            raise ConfigError(
                f"the log was tokenized with another tokenizer than that of {name}: give --tokenizer {name}"
            )
        self._codec, self._settings, self._name = codec, settings, name
        self._draft = DraftConfig(num_speculative_tokens=int(settings["draft_limit"]))

    def measure(self, model: PreTrainedModel) -> dict[str, Any]:
        settings, limit = self._settings, model_limit(model)
        requests = [
            (number, tuple(prompt), length)
            for number, (prompt, length) in enumerate(zip(settings["prompts"], settings["lengths"], strict=True))
            if limit is None or len(prompt) + length < limit
        ]
        if not requests:
            raise ConfigError(
                f"no prompt of the log fits into the context of {self._name} ({limit} tokens): give shorter requests"
            )
        room = max(len(prompt) + length for _, prompt, length in requests) + 1
        tune_threads(open_target(model, num_slots=1, max_length=room, max_draft_tokens=1))
        return {
            "too_long": len(settings["prompts"]) - len(requests),
            "temperatures": [self._decode(model, requests, float(each), room) for each in settings["temperatures"]],
        }

    def _decode(
        self,
        model: PreTrainedModel,
        requests: Sequence[tuple[int, tuple[int, ...], int]],
        temperature: float,
        room: int,
    ) -> dict[str, Any]:
        settings = self._settings
        limit_s = 60.0 * float(settings["minutes"]) / len(settings["temperatures"])
        with CacheManager(CacheConfig(), self._codec.fingerprint) as caches:
            for directory in settings["warm"]:
                caches.add_prebuilt_directory(Path(directory))
            engines = {
                name: _open_engine(model, self._codec, name, self._draft, room, known)
                for name, known in zip(VARIANTS, (None, caches), strict=True)
            }

            def answer(
                variant: str, logprobs: int | None, number: int, prompt: tuple[int, ...], max_tokens: int
            ) -> Any:
                sampling = SamplingParams(
                    max_tokens=max_tokens, temperature=temperature, seed=number, logprobs=logprobs
                )
                request = Request(
                    request_id=f"{number} {logprobs}",
                    prompt_token_ids=prompt,
                    sampling=sampling,
                    learn=settings["learns"],
                )
                return _complete(engines[variant], request)[0]

            rows, started = list[dict[str, Any]](), time.monotonic()
            reported_s = -_REPORT_EVERY_S
            for place, request in enumerate(requests):
                now = time.monotonic() - started
                if now > limit_s:
                    break
                if now - reported_s >= _REPORT_EVERY_S:
                    reported_s = now
                    _report(
                        f"decoding request {place + 1} of {len(requests)} at temperature {temperature:g}, "
                        "with and without drafts"
                    )
                variants = {
                    variant: answer(variant, None, *request) for variant in (VARIANTS if place % 2 else VARIANTS[::-1])
                }
                caches.flush()
                rows.append(
                    {"request": request[0], "same": variants["none"].pop("said") == variants["ssd"]["said"], **variants}
                )
            of_bits = requests[: len(rows) : max(1, -(-len(rows) // _NUM_BIT_COMPARED))]
            other_bits = sum(answer("none", 0, *each)["said"] != answer("ssd", 0, *each)["said"] for each in of_bits)
        return {"temperature": temperature, "requests": rows, "bits_compared": len(of_bits), "bits_differ": other_bits}


def _report(what: str) -> None:
    print(what, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
