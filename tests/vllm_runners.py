"""vLLM's model runners as far as our drafters look at them, so that these are driven without vLLM.

The order of events is that of vLLM 0.32. V1 (``vllm/v1/worker/gpu_model_runner.py``) keeps rows of tokens: what has
ended is told, finished requests leave and the last row moves into the gap, new and resumed ones come at the end, drafts
stand behind the text while they are verified, and ``propose`` is called after the sampled tokens were written. V2
(``vllm/v1/worker/gpu/model_runner.py``) keeps slots, on a device that may be late: requests end, others begin, the rows
of a step are sampled and written to the slots, then drafts are asked for. Drafts are verified against a script.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from ssd.bundled import MODEL_PATH
from ssd.integrations.vllm_hooks import LENGTHS, METHOD, MODEL

MAX_MODEL_LEN = 256
VOCAB_SIZE = 4096


def vllm_config(
    *,
    limit: int = 8,
    max_num_reqs: int = 8,
    max_model_len: int = MAX_MODEL_LEN,
    adaptive: bool = False,
    **settings: Any,
) -> Any:
    """What of vLLM's configuration ours read. ``limit`` : tokens of a draft. ``settings`` : ours."""
    return SimpleNamespace(
        speculative_config=SimpleNamespace(
            method=METHOD, model=MODEL, num_speculative_tokens=limit, enable_adaptive_verification=adaptive
        ),
        scheduler_config=SimpleNamespace(max_num_seqs=max_num_reqs),
        model_config=SimpleNamespace(
            model=str(MODEL_PATH),
            tokenizer=str(MODEL_PATH),
            tokenizer_revision=None,
            trust_remote_code=False,
            max_model_len=max_model_len,
            get_vocab_size=lambda: VOCAB_SIZE,
        ),
        parallel_config=SimpleNamespace(pipeline_parallel_size=1, data_parallel_size=1, data_parallel_rank=0),
        additional_config={"ssd": settings} if settings else {},
    )


@dataclass(slots=True)
class Scripted:
    """A request whose target always says ``output``; its client gets ``max_tokens`` of that."""

    prompt: list[int]
    output: list[int]
    max_tokens: int
    said: list[int] = field(default_factory=list)
    num_computed: int = 0
    """Of the prompt, or of the text at its return, in this stay."""
    prefill: int = 0
    slot: int = 0

    @property
    def output_token_ids(self) -> list[int]:
        """vLLM's name for what was said."""
        return self.said

    @property
    def text(self) -> list[int]:
        """Prompt and what was said."""
        return self.prompt + self.said

    @property
    def client_length(self) -> int:
        """Tokens of the text that its client got, the prompt included."""
        return len(self.prompt) + min(len(self.said), self.max_tokens)


def finishing(names: Iterable[str], limit: int = 99) -> SimpleNamespace:
    """What V1's scheduler says to the runner. ``limit`` : tokens of a draft that it has room for."""
    return SimpleNamespace(finished_req_ids=set(names), num_spec_tokens_to_schedule=limit)


def scripted(seed: int, *, num_output: int = 200, max_tokens: int = 12) -> Scripted:
    """Tokens that do not repeat, behind a prompt that is shorter than a block: none is left out as known."""
    tokens = np.random.default_rng(seed).integers(1, VOCAB_SIZE, 20 + num_output).tolist()
    return Scripted(tokens[:20], tokens[20:], max_tokens)


def learned_by(drafter: Any) -> list[tuple[int, ...]]:
    """Fills while the drafter learns: every sequence that its cache stored."""
    sequences: list[tuple[int, ...]] = []
    cache = drafter._core.cache
    cache.add_listener(lambda pieces: sequences.extend(tuple(piece.tolist()) for piece in pieces))
    return sequences


# V1


class Runner:
    """vLLM's model runner, as far as a proposer looks at it."""

    def __init__(self, batch: VllmBatch) -> None:
        self.input_batch = batch
        self.requests = batch.requests


class VllmBatch:
    """The persistent batch, and a target that verifies drafts greedily."""

    def __init__(self, limit: int = 8, max_num_reqs: int = 8) -> None:
        self.limit = limit
        self.token_ids_cpu = np.zeros((max_num_reqs, MAX_MODEL_LEN), np.int32)
        self.num_tokens_no_spec = np.zeros(max_num_reqs, np.int32)
        self.num_prompt_tokens = np.zeros(max_num_reqs, np.int32)
        self.req_ids: list[str] = []
        self.req_prompt_embeds: dict[int, object] = {}
        self.requests: dict[str, Scripted] = {}
        self.drafts: dict[str, list[int]] = {}
        self.runner = Runner(self)

    def add(self, name: str, request: Scripted) -> None:
        """A new request, or one that comes back, in the row after the last."""
        self.requests[name] = request
        row = len(self.req_ids)
        self.req_ids.append(name)
        text = request.text
        self.token_ids_cpu[row, : len(text)] = text
        self.num_tokens_no_spec[row] = len(text)
        self.num_prompt_tokens[row] = len(request.prompt)

    def remove(self, name: str) -> None:
        """Take a request out of the rows; the last one moves into its place. Old text stays where it was."""
        row, last = self.req_ids.index(name), len(self.req_ids) - 1
        if row != last:
            self.swap(row, last)
        self.req_ids.pop()
        self.drafts.pop(name, None)

    def finish(self, name: str) -> Scripted:
        """A request is over."""
        self.remove(name)
        return self.requests.pop(name)

    def swap(self, i: int, j: int) -> None:
        """Exchange two rows."""
        for rows in (self.token_ids_cpu, self.num_tokens_no_spec, self.num_prompt_tokens):
            rows[[i, j]] = rows[[j, i]]
        self.req_ids[i], self.req_ids[j] = self.req_ids[j], self.req_ids[i]

    def sample(self, prefilling: Collection[str] = ()) -> list[list[int]]:
        """One step of the target: new tokens of each row, written behind its text; none for those prefilling."""
        sampled = []
        for row, name in enumerate(self.req_ids):
            request, draft = self.requests[name], self.drafts.pop(name, [])
            new: list[int] = []
            if name not in prefilling:
                coming = request.output[len(request.said) :]
                agreed = next((k for k, (a, b) in enumerate(zip(draft, coming, strict=False)) if a != b), len(draft))
                new = coming[: min(agreed + 1, len(coming))]
            start = int(self.num_tokens_no_spec[row])
            self.token_ids_cpu[row, start : start + len(draft)] = draft  # as vLLM leaves them, also the rejected ones
            self.token_ids_cpu[row, start : start + len(new)] = new
            self.num_tokens_no_spec[row] = start + len(new)
            request.said += new
            sampled.append(new)
        return sampled

    def step(self, proposer: Any, prefilling: Collection[str] = ()) -> list[list[int]]:
        """Say that a step begins, sample, then ask for drafts; returns them."""
        proposer.on_finished(self.runner, finishing(()))
        sampled = self.sample(prefilling)
        drafts: list[list[int]] = proposer.propose(
            sampled, self.num_tokens_no_spec, self.token_ids_cpu, slot_mappings=None
        )
        assert len(drafts) == len(sampled)
        for name, new, draft in zip(self.req_ids, sampled, drafts, strict=True):
            assert len(draft) <= self.limit
            assert not draft or new, "a row that is prefilling has no draft"
            self.drafts[name] = draft
        return drafts

    def finished(self) -> list[str]:
        """Requests that have said enough."""
        return [name for name in self.req_ids if len(self.requests[name].said) >= self.requests[name].max_tokens]


# V2


class LateEvent:
    """Happens ``lag`` steps after it was recorded."""

    def __init__(self, runner: HandMadeRunner) -> None:
        self._runner, self._due = runner, 0

    def record(self, stream: object) -> None:
        self._due = self._runner.num_steps + self._runner.lag

    def query(self) -> bool:
        return bool(self._runner.num_steps >= self._due)

    def synchronize(self) -> None:
        self._due = 0


class HandMadeRunner:
    """Slots of tokens, the rows of each step, and a target that follows scripts."""

    def __init__(self, *, max_num_reqs: int, max_model_len: int, width: int, lag: int = 0) -> None:
        """``width`` : tokens of a draft. ``lag`` : after so many further steps what a step gave is on the host."""
        self.width, self.lag, self.num_steps = width, lag, 0
        self.states = SimpleNamespace(
            all_token_ids=SimpleNamespace(gpu=torch.zeros((max_num_reqs, max_model_len), dtype=torch.int32)),
            total_len=SimpleNamespace(gpu=torch.zeros(max_num_reqs, dtype=torch.int32)),
        )
        self.last_sampled = torch.zeros((max_num_reqs, 1), dtype=torch.int64)
        self.drafts = torch.zeros((max_num_reqs, width), dtype=torch.int64)
        self._free = list(range(max_num_reqs))
        self.requests: dict[str, Scripted] = {}
        self.speculator: Any = None

    def begin(self, requests: dict[str, Scripted], *, stop: Sequence[str] = (), prompt_embeds: Any = None) -> None:
        """Requests begin, or come back with what they said."""
        new = []
        for name, request in requests.items():
            self.requests[name] = request
            request.slot, request.num_computed, request.prefill = self._free.pop(), 0, len(request.text)
            self.states.all_token_ids.gpu[request.slot, : request.prefill] = torch.tensor(request.text)
            self.states.total_len.gpu[request.slot] = request.prefill
            params = SimpleNamespace(stop=list(stop), min_tokens=0, skip_special_tokens=True)
            new.append(
                SimpleNamespace(
                    req_id=name,
                    prompt_len=len(request.prompt),
                    prefill_token_ids=request.text,
                    sampling_params=params,
                    prompt_embeds=prompt_embeds,
                )
            )
        self.speculator.on_add(SimpleNamespace(scheduled_new_reqs=new, finished_req_ids=set()))

    def end(self, names: Iterable[str]) -> list[Scripted]:
        """Requests are over; the runner is told by the next step's schedule."""
        names = list(names)
        ended = [self.preempt(name) for name in names]
        output = SimpleNamespace(scheduled_new_reqs=[], finished_req_ids=set(names))
        setattr(output, LENGTHS, {name: r.client_length for name, r in zip(names, ended, strict=True)})
        self.speculator.on_finished(self, output)
        return ended

    def preempt(self, name: str) -> Scripted:
        """A request loses its slot."""
        request = self.requests.pop(name)
        self._free.append(request.slot)
        return request

    def step(self, names: Sequence[str], waiting: Collection[str] = (), width: int | None = None) -> torch.Tensor:
        """One step of the rows ``names``, then drafts for them, which are returned. Those ``waiting`` go on with their
        prompts and say nothing. ``width`` : so many tokens of each draft are looked at, the others made -1."""
        tokens, count = self.states.all_token_ids.gpu, len(names)
        num_sampled = torch.zeros(count, dtype=torch.int32)
        computed, scheduled, prefill = np.zeros((3, count), np.int32)
        for row, name in enumerate(names):
            request = self.requests[name]
            slot, left = request.slot, request.prefill - request.num_computed
            computed[row], prefill[row] = request.num_computed, request.prefill
            if left > 0:  # the prompt, or a part of it
                scheduled[row] = left if name not in waiting else max(1, left // 2) if left > 1 else 0
                request.num_computed += int(scheduled[row])
                if request.num_computed < request.prefill:
                    continue
                draft: list[int] = []
            else:
                scheduled[row] = 1 + self.width
                draft = self.drafts[slot].tolist()
            coming = request.output[len(request.said) :]
            agreed = next((k for k, (a, b) in enumerate(zip(draft, coming, strict=False)) if a != b), len(draft))
            room = tokens.shape[1] - len(request.text)
            new = coming[: min(agreed + 1, room, len(coming))]
            start = len(request.text)
            tokens[slot, start : start + len(new)] = torch.tensor(new, dtype=torch.int32)
            self.states.total_len.gpu[slot] += len(new)
            self.last_sampled[slot, 0] = new[-1]
            request.said += new
            request.num_computed = start + len(new) - 1
            num_sampled[row] = len(new)
        slots = torch.tensor([self.requests[name].slot for name in names], dtype=torch.int64)
        self.num_steps += 1
        drafts: torch.Tensor = self.speculator.propose(
            SimpleNamespace(
                num_reqs=count,
                req_ids=list(names),
                idx_mapping=slots,
                num_scheduled_tokens=scheduled,
                num_computed_tokens_np=computed,
                prefill_len_np=prefill,
            ),
            None,
            None,
            None,
            None,
            num_sampled,
            None,
            self.last_sampled,
            None,
            None,
            None,
            num_speculative_tokens=self.width if width is None else width,
        )
        if width is not None:
            drafts[:, width:] = -1
        self.drafts[slots] = drafts
        return drafts.clone()
