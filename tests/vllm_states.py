"""Hand-made states of vLLM's V2 model runner, so that our speculator is driven without vLLM, and a device that is late.

The order of events is that of vLLM 0.32 (``vllm/v1/worker/gpu/model_runner.py``): requests end, others begin, the rows
of a step are sampled and written to the slots, then drafts are asked for. Drafts are verified against a script.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from ssd.integrations.vllm_hooks import LENGTHS, METHOD, MODEL


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
    def text(self) -> list[int]:
        """Prompt and what was said."""
        return self.prompt + self.said

    @property
    def client_length(self) -> int:
        """Tokens of the text that its client got, the prompt included."""
        return len(self.prompt) + min(len(self.said), self.max_tokens)


class LateEvent:
    """Happens ``lag`` steps after it was recorded."""

    def __init__(self, runner: HandMadeRunner) -> None:
        self._runner, self._due = runner, 0

    def record(self, stream: object) -> None:
        self._due = self._runner.num_steps + self._runner.lag

    def query(self) -> bool:
        if self._runner.num_steps < self._due:
            self._runner.num_waits += 1
            return False
        return True

    def synchronize(self) -> None:
        self._due = 0


class HandMadeRunner:
    """Slots of tokens, the rows of each step, and a target that follows scripts."""

    def __init__(self, *, max_num_reqs: int, max_model_len: int, width: int, lag: int = 0) -> None:
        """``width`` : tokens of a draft. ``lag`` : after so many further steps what a step gave is on the host."""
        self.width, self.lag, self.num_steps, self.num_waits = width, lag, 0, 0
        self.states = SimpleNamespace(
            all_token_ids=SimpleNamespace(gpu=torch.zeros((max_num_reqs, max_model_len), dtype=torch.int32)),
            total_len=SimpleNamespace(gpu=torch.zeros(max_num_reqs, dtype=torch.int32)),
        )
        self.last_sampled = torch.zeros((max_num_reqs, 1), dtype=torch.int64)
        self.drafts = torch.zeros((max_num_reqs, width), dtype=torch.int64)
        self._free = list(range(max_num_reqs))
        self.requests: dict[str, Scripted] = {}
        self.speculator: Any = None
        self.num_accepted = self.num_said = self.num_row_steps = 0

    def begin(self, requests: dict[str, Scripted], *, stop: Sequence[str] = ()) -> None:
        """Requests begin, or come back with what they said."""
        new = []
        for name, request in requests.items():
            self.requests[name] = request
            request.slot, request.num_computed, request.prefill = self._free.pop(), 0, len(request.text)
            self.states.all_token_ids.gpu[request.slot, : request.prefill] = torch.tensor(request.text)
            self.states.total_len.gpu[request.slot] = request.prefill
            params = SimpleNamespace(stop=list(stop), min_tokens=0, skip_special_tokens=True)
            new.append(SimpleNamespace(req_id=name, prompt_len=len(request.prompt), prefill_token_ids=request.text,
                                       sampling_params=params))  # fmt: skip
        self.speculator.on_add(SimpleNamespace(scheduled_new_reqs=new, finished_req_ids=set()))

    def end(self, names: Iterable[str]) -> list[Scripted]:
        """Requests are over; the runner is told by the next step's schedule."""
        names = list(names)
        ended = [self._leave(name) for name in names]
        output = SimpleNamespace(scheduled_new_reqs=[], finished_req_ids=set(names))
        setattr(output, LENGTHS, {name: r.client_length for name, r in zip(names, ended, strict=True)})
        self.speculator.on_step(self, output)
        return ended

    def preempt(self, name: str) -> Scripted:
        """A request loses its slot."""
        return self._leave(name)

    def _leave(self, name: str) -> Scripted:
        request = self.requests.pop(name)
        self._free.append(request.slot)
        return request

    def step(self, names: Sequence[str], waiting: Collection[str] = ()) -> torch.Tensor:
        """One step of the rows ``names``, then drafts for them, which are returned. Those ``waiting`` go on with their
        prompts and say nothing."""
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
            self.num_row_steps += 1
            self.num_accepted += len(new) - 1
            self.num_said += len(new)
        slots = torch.tensor([self.requests[name].slot for name in names], dtype=torch.int64)
        self.num_steps += 1
        drafts: torch.Tensor = self.speculator.propose(
            SimpleNamespace(
                num_reqs=count, req_ids=list(names), idx_mapping=slots, num_scheduled_tokens=scheduled,
                num_computed_tokens_np=computed, prefill_len_np=prefill,
            ), None, None, None, None, num_sampled, None, self.last_sampled, None, None, None,
            num_speculative_tokens=self.width,
        )  # fmt: skip
        self.drafts[slots] = drafts
        return drafts.clone()


def vllm_config(
    model: str, *, width: int, max_num_reqs: int, max_model_len: int, vocab_size: int, **settings: Any
) -> Any:
    """What of vLLM's configuration a speculator reads; ``settings`` : ours."""
    return SimpleNamespace(
        speculative_config=SimpleNamespace(
            method=METHOD, model=MODEL, num_speculative_tokens=width, enable_adaptive_verification=False
        ),
        scheduler_config=SimpleNamespace(max_num_seqs=max_num_reqs),
        model_config=SimpleNamespace(
            model=model, tokenizer=model, max_model_len=max_model_len, get_vocab_size=lambda: vocab_size
        ),
        parallel_config=SimpleNamespace(pipeline_parallel_size=1, data_parallel_size=1, data_parallel_rank=0),
        additional_config={"ssd": settings} if settings else {},
    )
