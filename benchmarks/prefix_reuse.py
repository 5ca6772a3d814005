"""What does it bring to keep keys and values? Prompt tokens computed and seconds, with reuse and without.

``python -m benchmarks.prefix_reuse [MODEL] [--slots N] [--rounds N] [--json]``

Three kinds of traffic over pieces of the Python standard library, greedy and without speculation:

1. conversations: some at once, each turn repeats all before it, all begin with one system prompt;
2. choices: several answers to one prompt (drawn, with a seed);
3. unrelated prompts: nothing is shared, so that reuse can only cost.

Both engines get the same requests in turn, in every round first the one, then the other. The outputs of both are
compared token by token; the run fails where they differ. Prints a table; the last line of stdout is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from statistics import median
from typing import Any

from benchmarks.environment import head, model_facts, model_name
from benchmarks.exactness import differs, first_difference
from benchmarks.workloads import snippets
from ssd.bundled import MODEL_PATH
from ssd.config import DraftConfig, EngineConfig, SamplingParams
from ssd.drafting import make_drafter
from ssd.drafting.noise import SequenceNoise
from ssd.engine import Engine, Request
from ssd.model.loading.load_target import load_model, open_target
from ssd.model.target import Target
from ssd.text.codec import TextCodec

SYSTEM_TOKENS = 256
CONVERSATIONS = 4
TURNS = 4
TURN_TOKENS = 48
ANSWER_TOKENS = 32
CHOICES = 4
MAX_LENGTH = 1024


@dataclass(slots=True)
class Result:
    """One kind of traffic under one engine in one round."""

    seconds: float
    num_prompt_tokens: int
    num_computed: int


Asked = tuple[tuple[int, ...], SamplingParams, int]
"""Prompt, sampling, choice index."""


def main() -> None:
    """Run all, print a table and one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default=str(MODEL_PATH), help="directory or id (default: the bundled one)")
    parser.add_argument("--slots", type=int, default=8, help="(default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="(default: %(default)s)")
    parser.add_argument("--device", default="cpu", help="(default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="no table")
    args = parser.parse_args()
    codec = TextCodec.load(args.model)
    model = load_model(args.model, dtype="float32", device=args.device)
    targets = [open_target(model, num_slots=args.slots, max_length=MAX_LENGTH) for _ in range(2)]
    results: dict[str, Any] = {}
    for name, traffic in (("conversations", conversations), ("choices", choices), ("unrelated", unrelated)):
        found: dict[bool, list[Result]] = {True: [], False: []}
        for number in range(args.rounds):
            outputs = {}
            for reuse, target in zip((True, False), targets, strict=True):
                result, outputs[reuse] = run(target, traffic(codec, number), reuse=reuse)
                found[reuse].append(result)
            compare(targets[1], outputs[True], outputs[False])
        results[name] = {("on" if reuse else "off"): summary(found[reuse]) for reuse in found}
        results[name]["speedup"] = round(results[name]["off"]["seconds"] / results[name]["on"]["seconds"], 3)
        if not args.json:
            on, off = results[name]["on"], results[name]["off"]
            print(
                f"{name:15} prompt tokens {on['num_prompt_tokens']:6}, computed {on['num_computed']:6} with reuse, "
                f"{off['num_computed']:6} without; seconds {on['seconds']:.2f} and {off['seconds']:.2f}: "
                f"{results[name]['speedup']:.2f}x"
            )
    parameters = {
        "slots": args.slots,
        "rounds": args.rounds,
        "system_tokens": SYSTEM_TOKENS,
        "conversations": CONVERSATIONS,
        "turns": TURNS,
        "turn_tokens": TURN_TOKENS,
        "answer_tokens": ANSWER_TOKENS,
        "choices": CHOICES,
    }
    facts = {**head("prefix_reuse"), **model_facts(model_name(args.model), model)}
    print(json.dumps({**facts, "parameters": parameters, "results": results}))


def pieces(codec: TextCodec, seed: int) -> Iterator[tuple[int, ...]]:
    """Texts of ``TURN_TOKENS`` tokens, all different."""
    for snippet in snippets(seed):
        token_ids = codec.encode_completion(snippet)
        if len(token_ids) >= TURN_TOKENS:
            yield tuple(token_ids[:TURN_TOKENS])


def greedy() -> SamplingParams:
    """Answers of a fixed length, so that both engines do the same work."""
    return SamplingParams(max_tokens=ANSWER_TOKENS, temperature=0.0, ignore_eos=True)


Traffic = Generator[list[Asked], dict[Asked, list[int]], None]
"""What is asked at once; gets the outputs and says what is asked next."""


def conversations(codec: TextCodec, seed: int) -> Traffic:
    """One turn of every conversation at a time."""
    texts = pieces(codec, seed)
    system = tuple(token for _ in range(SYSTEM_TOKENS // TURN_TOKENS + 1) for token in next(texts))[:SYSTEM_TOKENS]
    histories = [system] * CONVERSATIONS
    for _ in range(TURNS):
        asked = [((*history, *next(texts)), greedy(), 0) for history in histories]
        outputs = yield asked
        histories = [(*one[0], *outputs[one]) for one in asked]


def choices(codec: TextCodec, seed: int) -> Traffic:
    """Two prompts at once, several choices each."""
    texts = pieces(codec, seed)
    drawn = SamplingParams(max_tokens=ANSWER_TOKENS, temperature=0.8, top_p=0.95, seed=seed, ignore_eos=True)
    prompts = [tuple(token for _ in range(8) for token in next(texts)) for _ in range(2)]
    yield [(prompt, drawn, choice) for prompt in prompts for choice in range(CHOICES)]


def unrelated(codec: TextCodec, seed: int) -> Traffic:
    """One after another and several at once, nothing in common."""
    texts = pieces(codec, seed)
    for number in (1, 1, 3, 4, 1, 2):
        yield [(next(texts), greedy(), 0) for _ in range(number)]


def run(target: Target, traffic: Traffic, *, reuse: bool) -> tuple[Result, dict[Asked, list[int]]]:
    """Serve the traffic; what comes next is asked when all before it have ended."""
    engine = Engine(
        target,
        drafter=make_drafter("none", DraftConfig()),
        config=EngineConfig(max_num_seqs=target.num_slots, enable_prefix_caching=reuse),
        draft=DraftConfig(num_speculative_tokens=0),
    )
    outputs: dict[Asked, list[int]] = {}
    num_cached = number = 0
    began = time.perf_counter()
    together = next(traffic, None)
    while together is not None:
        names: dict[str, Asked] = {}
        for asked in together:
            names[str(number)], outputs[asked] = asked, []
            prompt, sampling, choice = asked
            engine.submit(
                Request(request_id=str(number), prompt_token_ids=prompt, sampling=sampling, choice_index=choice)
            )
            number += 1
        while engine.has_work():
            for output in engine.step():
                outputs[names[output.request_id]] += output.token_ids
                num_cached += output.stats.num_cached_tokens if output.finish_reason else 0
        try:
            together = traffic.send(outputs)
        except StopIteration:
            together = None
    seconds = time.perf_counter() - began
    num_prompt_tokens = engine.metrics.prompt_tokens
    return Result(seconds, num_prompt_tokens, num_prompt_tokens - num_cached), outputs


def compare(target: Target, found: dict[Asked, list[int]], expected: dict[Asked, list[int]]) -> None:
    """SystemExit where an output differs.

    A conversation that went on otherwise, with a model that is not exact, has no counterpart and is not compared.
    """
    for (prompt, sampling, choice), wanted in expected.items():
        tokens = found.get((prompt, sampling, choice), wanted)
        noise = None if sampling.seed is None else SequenceNoise.seeded(sampling.seed, choice)
        if differs(target, prompt, sampling, tokens, wanted, noise):
            raise SystemExit(f"an output differs at token {first_difference(tokens, wanted)}")


def summary(results: list[Result]) -> dict[str, Any]:
    """Medians and the spread of the seconds."""
    seconds = [result.seconds for result in results]
    return {
        "seconds": round(median(seconds), 4),
        "seconds_range": [round(min(seconds), 4), round(max(seconds), 4)],
        "num_prompt_tokens": int(median(result.num_prompt_tokens for result in results)),
        "num_computed": int(median(result.num_computed for result in results)),
    }


if __name__ == "__main__":
    main()
