"""What does a draft model bring? Acceptance, and tokens per second beside the cache.

``python -m benchmarks.draft_model [MODEL] [--draft-model MODEL] [--prompts N] [--max-tokens N] [--json]``

1. Acceptance: drafts of a fixed length, nothing cut, no other drafter; greedy and sampled.
   Without --draft-model the drafts come from copies of the target with noise on their weights: of known closeness.
2. Speed: the arbiter over retrieval and the draft model, retrieval alone, and no speculation, in turn over the same
   requests. Once with the target as it is: a copy is no smaller, so the question is what it costs to own a draft model
   that does not pay. Once with a target made slower by layers that add nothing to its residual stream: the same
   function at a known multiple of the cost.

All outputs are compared token by token with plain decoding.
Prints tables; the last line of stdout is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import replace
from statistics import median
from typing import Any

import torch
from transformers import PreTrainedModel

from benchmarks.environment import head
from benchmarks.exactness import differs, first_difference
from benchmarks.workloads import snippets
from ssd.bundled import MODEL_PATH
from ssd.config import CacheConfig, DraftConfig, EngineConfig, SamplingParams
from ssd.drafting import Arbiter, make_drafter
from ssd.drafting.protocol import Draft, Drafter, DraftRequest
from ssd.engine import Engine, Request
from ssd.engine.metrics import EngineMetrics
from ssd.model.draft.model import SOURCE, DraftModelDrafter
from ssd.model.draft.slots import READ_WIDTH
from ssd.model.loading.load_target import load_model, open_target
from ssd.model.target import Target
from ssd.retrieval.cache import CacheSet
from ssd.text.codec import TextCodec

NOISE_SHARES = (0.05, 0.1, 0.2)
"""Standard deviation of the noise, in those of each weight matrix."""

TEMPERATURES = (0.0, 0.7, 1.0)
MAX_LENGTH = 512
ROUNDS = 5


class Uncut(DraftModelDrafter):
    """Drafts as long as allowed, without estimates: the engine verifies all of it, however fast this machine is."""

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        """One draft per request, in order."""
        return [replace(draft, probabilities=None) for draft in super().propose(requests)]


def main(argv: Sequence[str] | None = None) -> None:
    """Both parts."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.draft_model", description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", default=str(MODEL_PATH), help="target (default: bundled)")
    parser.add_argument(
        "--draft-model", help="smaller model of the same tokenizer (default: noisy copies of the target)"
    )
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--max-tokens", type=int, default=48)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--extra-layers", type=int, default=18, help="idle layers of the slower target")
    parser.add_argument("--draft-length", type=int, default=4, help="of the acceptance runs")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="print the JSON line only")
    args = parser.parse_args(argv)
    say: Callable[[str], None] = (lambda _line: None) if args.json else print
    codec = TextCodec.load(args.model)
    targets = [
        open_target(
            deepened(load_model(args.model, dtype="float32"), extra), num_slots=args.batch, max_length=MAX_LENGTH
        )
        for extra in (0, args.extra_layers)
    ]
    prompts = [codec.encode_prompt(text)[-192:] for text in snippets(args.seed)[: args.prompts]]
    say(f"draft_model: {len(prompts)} prompts, {args.max_tokens} tokens each, batch {args.batch}, seed {args.seed}")
    bench, slower = (Bench(target, codec, prompts, args) for target in targets)
    result: dict[str, Any] = {
        **head("draft_model"),
        "parameters": {key: value for key, value in vars(args).items() if key not in ("model", "draft_model", "json")},
        "acceptance": [],
        "speed": [],
    }
    for name, draft in draft_models(args):
        say(f"\n{name}: drafts of {args.draft_length} tokens\ntemperature  accepted  tokens/step")
        for temperature in TEMPERATURES:
            row = bench.acceptance(name, draft, temperature)
            result["acceptance"].append(row)
            say(f"{temperature:11.1f}  {row['accepted']:8.3f}  {row['tokens_per_step']:11.2f}")
        for extra, engines in ((0, bench), (args.extra_layers, slower)):
            row = {"draft_model": name, "extra_layers": extra, **engines.speed(draft)}
            result["speed"].append(row)
            say(
                f"{extra:2} extra layers, tokens/s, median of {ROUNDS} windows: off {row['off']:.0f}, cache "
                f"{row['cache']:.0f}, cache and model {row['arbiter']:.0f}; {row['model_share']:.0%} of drafted tokens "
                "are the model's"
            )
    compared = bench.num_compared + slower.num_compared
    say(f"\n{compared} tokens compared with plain decoding, no difference")
    result["exactness"] = {"tokens": compared}
    print(json.dumps(result))


def draft_models(args: argparse.Namespace) -> list[tuple[str, Target]]:
    """Name and model of every draft model to measure."""
    if args.draft_model:
        return [(str(args.draft_model).rsplit("/", 1)[-1], _drive(load_model(args.draft_model, dtype="float32"), args))]
    return [
        (f"copy with noise {share:g}", _drive(with_noise(load_model(args.model, dtype="float32"), share), args))
        for share in NOISE_SHARES
    ]


def with_noise(model: PreTrainedModel, share: float, seed: int = 0) -> PreTrainedModel:
    """The model with Gaussian noise on every weight, ``share`` of the standard deviation of its matrix; in place."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator).to(parameter)
            parameter.add_(share * parameter.std() * noise)
    return model


def deepened(model: PreTrainedModel, extra_layers: int) -> PreTrainedModel:
    """The model with more layers, copies of its last whose output projections are zero; in place. Llama-like only."""
    if extra_layers:
        layers = model.model.layers
        for _ in range(extra_layers):
            layer = deepcopy(layers[-1])
            layer.self_attn.layer_idx = len(layers)
            with torch.no_grad():
                layer.self_attn.o_proj.weight.zero_()
                layer.mlp.down_proj.weight.zero_()
            layers.append(layer)
        model.config.num_hidden_layers = len(layers)
    return model


def _drive(model: PreTrainedModel, args: argparse.Namespace) -> Target:
    return open_target(model, num_slots=args.batch, max_length=MAX_LENGTH, max_draft_tokens=READ_WIDTH - 1)


class Bench:
    """Runs engines over one target and the same prompts, and compares what they put out."""

    def __init__(
        self, target: Target, codec: TextCodec, prompts: Sequence[Sequence[int]], args: argparse.Namespace
    ) -> None:
        self.num_compared = 0
        self._target, self._codec, self._prompts, self._args = target, codec, prompts, args
        self._plain = {temperature: self._run(None, temperature, 0)[0] for temperature in TEMPERATURES}

    def acceptance(self, name: str, draft: Target, temperature: float) -> dict[str, Any]:
        """Drafts of one length, none cut."""
        drafter = Uncut(draft, price=0.0)
        outputs, metrics = self._run(drafter, temperature, self._args.draft_length)
        self._check(outputs, temperature)
        counts = metrics.by_source[SOURCE]
        return {
            "draft_model": name,
            "temperature": temperature,
            "accepted": counts.num_accepted_tokens / counts.num_draft_tokens,
            "tokens_per_step": metrics.mean_acceptance_length,
        }

    def speed(self, draft: Target) -> dict[str, Any]:
        """Greedy requests in windows; each window once with every kind of engine, each kind with a life of its own."""
        makers: dict[str, Callable[[], Drafter]] = {
            "off": lambda: make_drafter("none", DraftConfig()),
            "cache": lambda: make_drafter("ssd", DraftConfig()),
            "arbiter": lambda: Arbiter([make_drafter("ssd", DraftConfig()), DraftModelDrafter(draft)]),
        }
        rates: dict[str, list[float]] = {kind: [] for kind in makers}
        size = max(1, len(self._prompts) // ROUNDS)
        engines, kinds = {}, list(makers)
        sets = {kind: CacheSet(CacheConfig(), fingerprint=self._codec.fingerprint) for kind in makers}
        try:
            for kind, make in makers.items():
                engines[kind] = self._engine(make(), 0 if kind == "off" else 16, sets[kind])
                engines[kind].warm_up()
            for window in range(ROUNDS):
                part = range(window * size, min((window + 1) * size, len(self._prompts)))
                for kind in sorted(kinds, key=lambda kind: (kinds.index(kind) + window) % len(kinds)):
                    began = time.perf_counter()
                    outputs = self._complete(engines[kind], part, 0.0)
                    rates[kind].append(sum(map(len, outputs.values())) / (time.perf_counter() - began))
                    self._check(outputs, 0.0)
        finally:
            for caches in sets.values():
                caches.close()
        counts = engines["arbiter"].metrics
        drafted = counts.by_source[SOURCE].num_draft_tokens if SOURCE in counts.by_source else 0
        return {
            **{kind: median(found) for kind, found in rates.items()},
            "model_share": drafted / max(1, counts.num_draft_tokens),
        }

    def _run(
        self, drafter: Drafter | None, temperature: float, limit: int
    ) -> tuple[dict[int, list[int]], EngineMetrics]:
        engine = self._engine(drafter or make_drafter("none", DraftConfig()), limit, None)
        return self._complete(engine, range(len(self._prompts)), temperature), engine.metrics

    def _engine(self, drafter: Drafter, limit: int, caches: CacheSet | None) -> Engine:
        return Engine(
            self._target,
            drafter=drafter,
            caches=caches,
            config=EngineConfig(max_num_seqs=self._args.batch),
            draft=DraftConfig(num_speculative_tokens=limit),
            eos_token_ids=self._codec.eos_token_ids,
        )

    def _complete(self, engine: Engine, which: Sequence[int], temperature: float) -> dict[int, list[int]]:
        outputs: dict[int, list[int]] = {index: [] for index in which}
        for index in which:
            sampling = self._sampling(index, temperature)
            prompt = tuple(self._prompts[index])
            engine.submit(Request(request_id=f"{id(outputs)}-{index}", prompt_token_ids=prompt, sampling=sampling))
        while engine.has_work():
            for output in engine.step():
                outputs[int(output.request_id.rsplit("-", 1)[1])].extend(output.token_ids)
        return outputs

    def _sampling(self, index: int, temperature: float) -> SamplingParams:
        return SamplingParams(
            max_tokens=self._args.max_tokens, temperature=temperature, seed=index if temperature else None
        )

    def _check(self, outputs: dict[int, list[int]], temperature: float) -> None:
        """Raise SystemExit where an output is not that of plain decoding."""
        for index, output in outputs.items():
            expected = self._plain[temperature][index]
            self.num_compared += len(expected)
            params = self._sampling(index, temperature)
            if differs(self._target, self._prompts[index], params, output, expected):
                raise SystemExit(f"prompt {index} differs at token {first_difference(output, expected)}")


if __name__ == "__main__":
    main()
