"""Run engine steps in which all draft tokens are accepted, and time the parts of a step."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from operator import attrgetter
from statistics import median
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from transformers import PreTrainedModel

from benchmarks.workloads import snippets
from ssd.config import EngineConfig, SamplingParams
from ssd.drafting.draft_records import DraftRow, clear_draft, row_at
from ssd.drafting.protocol import Drafter, DraftRequest
from ssd.drafting.suffix_drafter import NamespaceGroup, RequestState, SuffixDrafter
from ssd.engine import Engine, Request
from ssd.jit.addresses import Int64s, kernel
from ssd.model.runners.slot_runner import SlotRunner
from ssd.model.target import Target
from ssd.text.codec import TextCodec

Tokens = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Shape:
    """The shape of the steps to time.

    Attributes:
        batch: The number of rows.
        context: The number of tokens in each row in the middle of the run.
        draft: The number of draft tokens per row and step.
    """

    batch: int
    context: int
    draft: int

    @property
    def width(self) -> int:
        """The number of positions of each row in one forward pass."""
        return self.draft + 1


class KnownDrafter(SuffixDrafter):
    """A drafter that searches and scores as the default drafter does, but then drafts the known output of each request.

    So drafting costs the usual time, every pass has the requested width, and all draft tokens are accepted.
    """

    def __init__(self, known: Sequence[Sequence[int]], draft: int) -> None:
        super().__init__()
        self._texts = np.zeros((len(known), max(map(len, known), default=0)), np.int32)
        self._lengths = np.array([len(text) for text in known], np.int64)
        for text, row in zip(known, self._texts, strict=True):
            row[: len(text)] = text
        self._draft = draft
        self._places = dict[int, int]()

    def start_request(self, request: DraftRequest, row: DraftRow | None = None, at: int = 0) -> RequestState:
        """Start a request, and remember which known output belongs to it."""
        kept = super().start_request(request, row, at)
        self._places[kept.address] = int(request.request_id)
        return kept

    def draft_groups(self, rows: Int64s, groups: Iterable[NamespaceGroup]) -> None:
        """Run the default drafter, and replace its drafts by the next tokens of the known outputs."""
        super().draft_groups(rows, groups)
        places = np.array([self._places[address] for address in rows.tolist()], np.int64)
        _draft_known(rows, places, self._texts, self._lengths, self._draft)


@kernel
def _draft_known(  # pragma: no cover - compiled
    rows: Int64s, places: Int64s, texts: Tokens, lengths: Int64s, most: int
) -> None:
    for i in range(len(rows)):
        row, place = row_at(rows[i]), places[i]
        done = row.params.context_length - row.params.prompt_length
        clear_draft(row.draft)
        row.draft.has_estimates = 0
        row.draft.size = max(0, min(most, row.params.limit, lengths[place] - done))
        for j in range(row.draft.size):
            row.draft.tokens[j] = texts[place, done + j]


def synchronize(device: torch.device) -> None:
    """Wait until a GPU has finished all work; do nothing on a CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def pass_seconds(target: Target, shape: Shape, rounds: int) -> float:
    """Return the time of one forward pass when many are launched without waiting; the median of three rounds.

    If the host launches faster than the device computes, this is the device's time.
    """
    slots = list(range(shape.batch))
    for slot in slots:
        target.rollback(slot, 0)  # the engine before kept what it had computed
        target.prefill([slot], np.full((1, shape.context), 5), [shape.context])
    tokens, counts = np.full((shape.batch, shape.width), 7), [shape.width] * shape.batch

    def passes(number: int) -> float:
        synchronize(target.device)
        began = time.perf_counter()
        for _ in range(number):
            target.forward(slots, tokens, counts)
            for slot in slots:
                target.rollback(slot, shape.context)
        synchronize(target.device)
        return (time.perf_counter() - began) / number

    passes(2)
    found = median(passes(rounds) for _ in range(3))
    for slot in slots:
        target.rollback(slot, 0)
    return found


PARTS: Final = {
    "admit": "_admit_and_cancel",
    "prefill": "_prefill_prompts",
    "prepare": "_speculation.prepare_drafts",
    "propose": "_speculation.propose",
    "launch": "_pipeline.launch",
    "verify": "_pipeline.verify",
    "commit": "_commit",
    "count": "_update_counts",
    "spell": "_make_outputs",
    "ahead": "_pipeline.launch_ahead",
}
"""The parts of an engine step, with the method of the engine that runs each part."""


DRAFTING: Final = "drafting"
"""The name for the time of the drafter's own calls, which lie within other parts."""


class Clock:
    """Measures the seconds spent in each part of an engine's steps, until ``seconds`` is cleared."""

    def __init__(
        self,
        engine: Engine,
        drafter: Drafter | None = None,
        *,
        now: Callable[[], float] = time.perf_counter,
        mark: Callable[[str], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        """Wrap the methods of the engine and the drafter, and start measuring.

        ``now`` is the clock. ``mark`` returns a context manager that is entered with each part's name, for a profiler.
        """
        self.seconds: dict[str, float] = defaultdict(float)
        self._now, self._mark = now, mark
        for part, path in PARTS.items():
            owner, _, name = path.rpartition(".")
            self._watch(attrgetter(owner)(engine) if owner else engine, name, part)
        for name in ("draft_groups", "observe", "learn_scores") if drafter is not None else ():
            self._watch(drafter, name, DRAFTING)

    def _watch(self, owner: Any, name: str, part: str) -> None:
        method = getattr(owner, name)

        def watched(*args: Any, **kwargs: Any) -> Any:
            began = self._now()
            with self._mark(part):
                found = method(*args, **kwargs)
            self.seconds[part] += self._now() - began
            return found

        setattr(owner, name, watched)


class Rows:
    """A running request for each prompt; ``outputs`` holds the tokens generated so far."""

    def __init__(self, engine: Engine, prompts: Sequence[Tokens], num_tokens: int, temperature: float = 0.0) -> None:
        self._engine = engine
        self.outputs: list[list[int]] = [[] for _ in prompts]
        for row, prompt in enumerate(prompts):
            sampling = SamplingParams(max_tokens=num_tokens, temperature=temperature, seed=row, ignore_eos=True)
            engine.submit(Request(request_id=str(row), prompt_token_ids=tuple(prompt.tolist()), sampling=sampling))

    def step(self) -> int:
        """Run one engine step, and return the number of new tokens."""
        new = 0
        for output in self._engine.step():
            self.outputs[int(output.request_id)] += output.token_ids
            new += len(output.token_ids)
        return new

    def read_prompts(self) -> None:
        """Run steps until every request has generated a token."""
        while not all(self.outputs):
            self.step()

    def finish(self) -> list[list[int]]:
        """Run steps until all requests have ended, and return their outputs."""
        while self._engine.has_work():
            self.step()
        return self.outputs


def at_once(target: Target, prompts: Sequence[Tokens]) -> EngineConfig:
    """Return settings with which all prompts are prefilled in one step, so that all rows start together."""
    return EngineConfig(max_num_seqs=target.num_slots, prefill_chunk_tokens=max(512, sum(map(len, prompts))))


def passes_of(target: Target) -> str:
    """Return how the target runs forward passes: the name of its graph runner, why that failed, or "plain"."""
    if not isinstance(target, SlotRunner) or target.graph_runner is None:
        return "plain"
    return target.graph_runner.failure or target.graph_runner.name


def weight_bytes(model: PreTrainedModel) -> int:
    """Return the bytes of weights that a forward pass reads; an untied input embedding is not read completely.

    Call it before a target is opened for the model, because targets replace layers.
    """
    weights: int = sum(p.numel() * p.element_size() for p in model.parameters())
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if embedding is not None and (head is None or embedding.weight is not head.weight):
        weights -= embedding.weight.numel() * embedding.weight.element_size()  # a few rows of it are read
    return weights


def copy_bytes_per_second(device: torch.device, num_bytes: int) -> float:
    """Return the device's memory bandwidth when copying: bytes read and written per second, the median of nine."""
    source = torch.ones(num_bytes // 4, dtype=torch.float32, device=device)
    goal = torch.empty_like(source)
    seconds = []
    for _ in range(10):
        synchronize(device)
        began = time.perf_counter()
        goal.copy_(source)
        synchronize(device)
        seconds.append(time.perf_counter() - began)
    return 2 * source.numel() * 4 / median(seconds[1:])


def texts_of(codec: TextCodec) -> list[int]:
    """Return the tokens of numpy's code."""
    return [token for text in snippets(0) for token in codec.encode_prompt(text)]


def prompts_of(text: Sequence[int], num: int, length: int) -> list[Tokens]:
    """Return ``num`` consecutive pieces of ``text``, int32[length] each; the text is repeated if it is too short."""
    return list(np.resize(np.array(text, np.int32), num * length).reshape(num, length))
