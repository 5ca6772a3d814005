"""Measure the time that the engine itself spends on the host in each decoding step, without a model and a GPU.

``python -m benchmarks.host [--batch B...] [--traffic off new again sampled] [--steps N] [--rounds R]``

Everything is real except the model: its forward passes compute nothing, but by the clock they take as long as those of
Llama-3.1-8B on an H100. Inputs and outputs are copied as for CUDA graphs. Each row generates a given text of code. The
kinds of traffic are "off" (speculation off), "new" (speculation on, empty cache), "again" (the cache contains the
texts) and "sampled" (as "again", at temperature 1).

The table shows microseconds per step, as medians over all steps of all rounds: the total host time, the time that a
device would be idle because the next pass has not been launched ("exposed"), and the time of each part. Every row must
have generated its text. Prints a table; the last line of stdout is one JSON object.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from transformers import PreTrainedModel

from benchmarks.run import Option, Run
from benchmarks.steps import Clock, Rows, Tokens, texts_of
from ssd.bundled import MODEL_PATH
from ssd.config import CacheConfig, DraftConfig, EngineConfig
from ssd.drafting import make_drafter
from ssd.drafting.token_recycling import TOP_K
from ssd.engine import Engine
from ssd.jit.addresses import Int64s
from ssd.model.cuda_graphs.graph_runner import CudaGraphRunner, PassFunction
from ssd.model.kv.kv_cache import SlotRows
from ssd.model.kv.tree import TreeShape
from ssd.model.loading.load_target import load_model
from ssd.model.runners.slot_runner import SlotRunner
from ssd.model.sampling.sampler import Noise, PassOutput
from ssd.model.target import Integers, TokenMatrix
from ssd.retrieval.cache_manager import CacheManager
from ssd.text.codec import TextCodec

Texts = npt.NDArray[np.int64]

_CERTAIN = 1e9
"""The logit of token 0 while passes are recorded: so large that token 0 is sampled with any noise."""
_TOP = torch.arange(TOP_K, 0, -1, dtype=torch.float32).view(torch.int32)
"""The logits that are reported for the top-k tokens of every position, as the bits of float32 numbers."""


class RecitingTarget(SlotRunner):
    """A target without a model: each slot generates a given text, and a forward pass only takes time.

    After a draft token that differs from the text, another token than the text's is sampled, as in a real verification.
    Buffers, recorded shapes and copies are those of the target for GPUs, but the recorded graphs do nothing. A pass
    starts when the previous one has ended, and reading its output waits for its end. Until ``is_engines`` is set,
    launching a pass waits too, because the engine times passes at its start. The time spent on producing the text is
    not counted.

    Attributes:
        idle_s: The seconds during which a device would have had nothing to do.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        num_slots: int,
        max_length: int,
        max_width: int,
        pass_seconds: Callable[[int], float],
    ) -> None:
        """Create slots. Only ``model``'s configuration is used. ``pass_seconds`` maps positions to a pass's time."""
        super().__init__(model, num_slots, max_length, max_width)
        self.is_asynchronous = True
        self.can_verify_trees = True
        self.idle_s, self.is_engines = 0.0, False
        self._saying_s = self._waited_s = self._free_at = 0.0
        self._sampled: TokenMatrix = np.zeros((0, 1), np.int64)
        self._pass_seconds = pass_seconds
        self._texts: Texts = np.zeros((num_slots, max_length + max_width + 1), np.int64)
        self.graph_runner = CudaGraphRunner(
            self,
            self._recorded,
            tolerance=1e-4,
            sampler=lambda logits, _keys, _temperatures: logits.argmax(-1),
            name="recited",
            keeps_top=True,
        )
        self.prefill([0], np.zeros((1, 1), np.int64), [1])  # keys and values are there from now on
        self.rollback(0, 0)

    def recite(self, slot: int, text: npt.NDArray[np.int32]) -> None:
        """Set the text of a slot, prompt included: int32[n], with n up to the slot's capacity."""
        self._texts[slot, : len(text)] = text

    def score(self, tokens: torch.Tensor, rows: SlotRows, **kwargs: Any) -> torch.Tensor:
        """Return logits [B, T, V] that select token 0, and store a KV cache of one number per position."""
        places = torch.zeros(len(tokens), 1, tokens.shape[1], 1)
        rows.kv_cache.store(0, rows, places, places)
        logits = torch.zeros(1, 1, self.vocab_size)
        logits[..., 0] = _CERTAIN
        return logits.expand(*tokens.shape, -1)

    def _recorded(self, step: PassFunction) -> PassFunction:
        """Return a stand-in for a recorded graph. Only its first call, which checks the recording, runs ``step``."""
        left = [step]
        return lambda: left.pop()() if left else None

    def _said(
        self, slots: npt.NDArray[np.int64], starts: npt.NDArray[np.int64], tokens: TokenMatrix, trees: TreeShape | None
    ) -> TokenMatrix:
        """Return the token sampled after each input token, int64[B, T].

        It is the next token of the text, or another token if an input token differs from the text.
        """
        ahead = np.arange(tokens.shape[1]) if trees is None else trees.depths
        at = slots[:, None], starts[:, None] + ahead
        differs = self._texts[at] != tokens
        if trees is None:
            is_lost = np.logical_or.accumulate(differs, axis=1)
        else:
            is_lost = (trees.tree_mask & differs[:, None, :]).any(-1)
        following = self._texts[at[0], at[1] + 1]
        said: TokenMatrix = np.where(is_lost, (31 * following + 7 * tokens + 1) % self.vocab_size, following)
        return said

    def _append(
        self,
        slots: Int64s,
        tokens: TokenMatrix,
        counts: Int64s,
        trees: TreeShape | None = None,
        noise: Noise | None = None,
        **kwargs: Any,
    ) -> PassOutput:
        starts = self.kv_cache.lengths[slots]
        return self._say(super()._append(slots, tokens, counts, trees, noise, **kwargs), slots, starts, tokens, trees)

    def run_ahead(self, slots: Integers, noise: Noise | None = None) -> PassOutput:
        rows = np.asarray(slots, np.int64)
        starts = self.kv_cache.lengths[rows].copy()
        return self._say(super().run_ahead(slots, noise), rows, starts, self._sampled, None)

    def _say(
        self, output: PassOutput, slots: Int64s, starts: Int64s, tokens: TokenMatrix, trees: TreeShape | None
    ) -> PassOutput:
        began = time.perf_counter()
        if output.sampled is not None and output.packed_top is not None:
            self._sampled = self._said(slots, starts, tokens, trees)
            said = torch.from_numpy(self._sampled)
            output.sampled.copy_(said)
            output.packed_top[..., 0, :] = (said[..., None] + torch.arange(TOP_K)) % self.vocab_size
            output.packed_top[..., 1, :] = _TOP
        self._saying_s += time.perf_counter() - began
        now = time.perf_counter() - self._saying_s
        self.idle_s += max(0.0, now - self._free_at)
        self._free_at = max(now, self._free_at) + self._pass_seconds(tokens.size)
        if not self.is_engines:
            self.wait_until(self._free_at)
        end: Any = _End(self, self._free_at)
        return replace(output, copied=end)

    def host_s(self) -> float:
        """Return a clock's time in seconds; the clock stops while the host waits for a forward pass."""
        return time.perf_counter() - self._saying_s - self._waited_s

    def wait_until(self, end: float) -> None:
        """Wait until the clock reaches ``end``, the end of a pass."""
        began = time.perf_counter()
        while time.perf_counter() - self._saying_s < end:
            pass
        self._waited_s += time.perf_counter() - began


class _End(NamedTuple):
    """The end of a pass, with the interface of ``torch.cuda.Event``."""

    target: RecitingTarget
    at_s: float

    def synchronize(self) -> None:
        self.target.wait_until(self.at_s)


TRAFFIC: Final = ("off", "new", "again", "sampled")
"""Speculation off; on with an empty cache; on with the texts in the cache; the same at temperature 1."""

PARTS: Final = ("prepare", "propose", "launch", "verify", "commit", "count", "spell", "ahead", "rest")
PROMPT_TOKENS: Final = 96
_FIRST_STEPS: Final = 8
"""The number of steps that are not timed, because the engine has not yet measured the costs of passes."""


def pass_seconds(num_positions: int) -> float:
    """Return the duration of a pass of Llama-3.1-8B on an H100 over this number of positions, in seconds.

    The linear fit is that of the simulator of "Speculative Decoding: Performance or Illusion?" (arXiv 2601.11580).
    """
    return 7.09274656e-3 + 2.10103129e-5 * num_positions


@dataclass(slots=True)
class Steps:
    """The timed steps of one run.

    Attributes:
        parts: The seconds of each part in each step.
        exposed: The seconds in each step during which a device would have been idle.
        drafted: The number of drafted tokens.
        accepted: The number of accepted tokens.
        is_right: Whether every row generated its text.
    """

    parts: dict[str, list[float]] = field(default_factory=lambda: {part: [] for part in PARTS})
    exposed: list[float] = field(default_factory=list)
    drafted: int = 0
    accepted: int = 0
    is_right: bool = True

    @property
    def host(self) -> list[float]:
        """The host's seconds in each step."""
        return [sum(parts) for parts in zip(*self.parts.values(), strict=True)]


def time_steps(
    model: PreTrainedModel, codec: TextCodec, texts: Sequence[Tokens], traffic: str, num_steps: int, limit: int
) -> Steps:
    """Time ``num_steps`` engine steps with one request per text.

    Each text must have `PROMPT_TOKENS` tokens for the prompt and as many as `tokens_said` returns for the output.
    """
    batch, length = len(texts), PROMPT_TOKENS + tokens_said(num_steps, limit)
    target = RecitingTarget(model, batch, length, limit + 1, pass_seconds)
    draft = DraftConfig(num_speculative_tokens=limit)
    with ExitStack() as resources:
        caches = resources.enter_context(CacheManager(CacheConfig(), fingerprint=codec.fingerprint, inline=True))
        engine = Engine(
            target,
            drafter=make_drafter("none" if traffic == "off" else "ssd", draft),
            codec=codec,
            caches=caches,
            config=EngineConfig(max_num_seqs=batch, enable_prefix_caching=False),
            draft=draft,
        )
        engine.warm_up()
        target.is_engines = True
        if traffic in ("again", "sampled"):
            for text in texts:
                caches.get("default").append(text, prompt_length=PROMPT_TOKENS)
            caches.maintain()
        return _timed(engine, target, texts, float(traffic == "sampled"), num_steps)


def tokens_said(num_steps: int, limit: int) -> int:
    """Return the maximum number of tokens that a row generates in ``num_steps`` timed steps and the untimed ones."""
    return (num_steps + _FIRST_STEPS) * (limit + 1)


def _timed(
    engine: Engine, target: RecitingTarget, texts: Sequence[Tokens], temperature: float, num_steps: int
) -> Steps:
    for row, text in enumerate(texts):  # free slots are given from the lowest on
        target.recite(row, text)
    length = len(texts[0]) - PROMPT_TOKENS
    rows = Rows(engine, [text[:PROMPT_TOKENS] for text in texts], length, temperature)
    found, clock = Steps(), Clock(engine, now=target.host_s)
    rows.read_prompts()
    for number in range(_FIRST_STEPS + num_steps):
        if max(map(len, rows.outputs)) >= length:
            break
        before = engine.metrics.num_draft_tokens, engine.metrics.num_accepted_tokens
        clock.seconds.clear()
        idle, began = target.idle_s, target.host_s()
        rows.step()
        took = target.host_s() - began
        if number < _FIRST_STEPS:
            continue
        parts = {part: clock.seconds[part] for part in PARTS}
        for part, seconds in {**parts, "rest": took - sum(parts.values())}.items():
            found.parts[part].append(seconds)
        found.exposed.append(target.idle_s - idle)
        found.drafted += engine.metrics.num_draft_tokens - before[0]
        found.accepted += engine.metrics.num_accepted_tokens - before[1]
    found.is_right = rows.finish() == [text[PROMPT_TOKENS:].tolist() for text in texts]
    return found


OPTIONS = {
    "batch": Option(default=[1, 8, 32, 64], metavar="B", help="batch sizes to measure"),
    "traffic": Option(default=list(TRAFFIC), choices=TRAFFIC),
    "steps": Option(default=60, help="number of timed steps per round"),
    "rounds": Option(default=3, help="number of rounds, each with all kinds of traffic"),
    "limit": Option(default=7, help="maximum number of draft tokens per row"),
}
COLUMNS = (
    ("traffic", "{traffic}"),
    (">rows", "{batch}"),
    (">host us", "{host_us_p50:.0f} ({host_us_p10_p90[0]:.0f} ... {host_us_p10_p90[1]:.0f})"),
    (">exposed", "{exposed_us_p50:.0f}"),
    *((f">{part}", f"{{parts_us_p50[{part}]:.0f}}") for part in PARTS),
    (">drafted", "{drafted_per_row}"),
    (">accepted", "{accepted_per_row}"),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return 1 if a row did not generate its text, else 0."""
    run = Run("host", __doc__, argv, OPTIONS, COLUMNS)
    args = run.args
    codec = TextCodec.load(str(MODEL_PATH))
    text = np.array(texts_of(codec), np.int32)
    is_right = True
    for batch in args.batch:
        runs: dict[str, list[Steps]] = {traffic: [] for traffic in args.traffic}
        for _ in range(args.rounds):
            for traffic in args.traffic:
                # A target changes its model.
                model = load_model(MODEL_PATH, dtype="float32", device="cpu")
                texts = pieces_of(text, batch, PROMPT_TOKENS + tokens_said(args.steps, args.limit))
                runs[traffic].append(time_steps(model, codec, texts, traffic, args.steps, args.limit))
        for traffic, found in runs.items():
            is_right = is_right and all(each.is_right for each in found)
            run.row(_row(traffic, batch, found))
    return run.end(is_right=is_right, rows=run.rows, is_wrong=not is_right)


def pieces_of(text: Tokens, count: int, length: int) -> list[Tokens]:
    """Return ``count`` pieces of a text with evenly spaced beginnings; they overlap if the text is short."""
    begins = np.linspace(0, len(text) - length, count).astype(int)
    return [text[begin : begin + length] for begin in begins]


def _row(traffic: str, batch: int, runs: Sequence[Steps]) -> dict[str, Any]:
    host = [seconds for run in runs for seconds in run.host]
    num_rows = batch * len(host)
    return {
        "traffic": traffic,
        "batch": batch,
        "steps": len(host),
        "host_us_p50": _us(median(host)),
        "host_us_p10_p90": [_us(float(each)) for each in np.percentile(host, [10, 90])],
        "exposed_us_p50": _us(median(seconds for run in runs for seconds in run.exposed)),
        "pass_us": _us(pass_seconds(batch)),
        "parts_us_p50": {part: _us(median(s for run in runs for s in run.parts[part])) for part in PARTS},
        "drafted_per_row": round(sum(run.drafted for run in runs) / num_rows, 2),
        "accepted_per_row": round(sum(run.accepted for run in runs) / num_rows, 2),
    }


def _us(seconds: float) -> float:
    return round(seconds * 1e6, 1)


if __name__ == "__main__":
    sys.exit(main())
