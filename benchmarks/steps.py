"""Steps of an engine whose drafts are all accepted, and a step's parts."""

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
    """``context`` : tokens a row holds in the middle of the run. ``draft`` : tokens drafted for each row and step."""

    batch: int
    context: int
    draft: int

    @property
    def width(self) -> int:
        """Positions of a row in one pass."""
        return self.draft + 1


class KnownDrafter(SuffixDrafter):
    """Looks up and judges as the default drafter does, then drafts what each request is known to say.

    So a step costs the host what it costs, every pass has the width that is asked for, and all of it is accepted.
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
        """And remember whose text goes where."""
        kept = super().start_request(request, row, at)
        self._places[kept.address] = int(request.request_id)
        return kept

    def draft_groups(self, rows: Int64s, groups: Iterable[NamespaceGroup]) -> None:
        """The next ``draft`` tokens of each text."""
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
    """Wait for what the device was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def pass_seconds(target: Target, shape: Shape, rounds: int) -> float:
    """Of one pass among many that are launched without waiting: the device's time, where the host is faster.

    The median of three rounds.
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
"""Parts of a step of the engine, and the method that is each."""


DRAFTING: Final = "drafting"
"""The drafter's own calls, within other parts."""


class Clock:
    """Seconds of each part since it was cleared."""

    def __init__(
        self,
        engine: Engine,
        drafter: Drafter | None = None,
        *,
        now: Callable[[], float] = time.perf_counter,
        mark: Callable[[str], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        """From now on. ``mark`` : entered with the name of each part, for a profiler."""
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
    """A request for each prompt, as long as asked for, and what each has said so far in ``outputs``."""

    def __init__(self, engine: Engine, prompts: Sequence[Tokens], num_tokens: int, temperature: float = 0.0) -> None:
        self._engine = engine
        self.outputs: list[list[int]] = [[] for _ in prompts]
        for row, prompt in enumerate(prompts):
            sampling = SamplingParams(max_tokens=num_tokens, temperature=temperature, seed=row, ignore_eos=True)
            engine.submit(Request(request_id=str(row), prompt_token_ids=tuple(prompt.tolist()), sampling=sampling))

    def step(self) -> int:
        """One of the engine's; returns how many tokens it put out."""
        new = 0
        for output in self._engine.step():
            self.outputs[int(output.request_id)] += output.token_ids
            new += len(output.token_ids)
        return new

    def read_prompts(self) -> None:
        """Until every row has said something."""
        while not all(self.outputs):
            self.step()

    def finish(self) -> list[list[int]]:
        """Until all have ended; returns what each said."""
        while self._engine.has_work():
            self.step()
        return self.outputs


def at_once(target: Target, prompts: Sequence[Tokens]) -> EngineConfig:
    """Settings with which all prompts are read in one step, so that no row ends before another begins."""
    return EngineConfig(max_num_seqs=target.num_slots, prefill_chunk_tokens=max(512, sum(map(len, prompts))))


def passes_of(target: Target) -> str:
    """How a target's passes are run, as it was opened."""
    if not isinstance(target, SlotRunner) or target.graph_runner is None:
        return "plain"
    return target.graph_runner.failure or target.graph_runner.name


def weight_bytes(model: PreTrainedModel) -> int:
    """Bytes of the weights that a pass reads, each once; of a model that no target has been opened for."""
    weights: int = sum(p.numel() * p.element_size() for p in model.parameters())
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if embedding is not None and (head is None or embedding.weight is not head.weight):
        weights -= embedding.weight.numel() * embedding.weight.element_size()  # a few rows of it are read
    return weights


def copy_bytes_per_second(device: torch.device, num_bytes: int) -> float:
    """What the device moves when it copies memory: read and written bytes a second, the median of nine copies."""
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
    """Tokens of code."""
    return [token for text in snippets(0) for token in codec.encode_prompt(text)]


def prompts_of(text: Sequence[int], num: int, length: int) -> list[Tokens]:
    """Different text for every row, int32[length] each: of ``text``, over and over."""
    return list(np.resize(np.array(text, np.int32), num * length).reshape(num, length))
