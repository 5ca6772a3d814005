"""Rows of tokens as vLLM's V1 model runner keeps them, so that a proposer can be driven without vLLM.

The order of events is that of vLLM 0.32 (``vllm/v1/worker/gpu_model_runner.py``): what has ended is told, finished
requests leave and the last row moves into the gap, new and resumed ones come at the end, drafts stand behind the text
while they are verified, and ``propose`` is called after the sampled tokens were written.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np

from ssd.bundled import MODEL_PATH

MAX_MODEL_LEN = 256
VOCAB_SIZE = 4096


def vllm_config(**ssd_settings: Any) -> Any:
    """What of vLLM's configuration a proposer reads; ``limit`` is the draft limit, the rest are settings of ours."""
    limit = ssd_settings.pop("limit", 8)
    return SimpleNamespace(
        speculative_config=SimpleNamespace(num_speculative_tokens=limit),
        model_config=SimpleNamespace(
            model=str(MODEL_PATH),
            tokenizer=str(MODEL_PATH),
            max_model_len=MAX_MODEL_LEN,
            get_vocab_size=lambda: VOCAB_SIZE,
        ),
        parallel_config=SimpleNamespace(pipeline_parallel_size=1, data_parallel_size=1, data_parallel_rank=0),
        additional_config={"ssd": ssd_settings} if ssd_settings else {},
    )


@dataclass(slots=True)
class Scripted:
    """A request whose target always says ``output``."""

    prompt: list[int]
    output: list[int]
    max_tokens: int
    said: list[int] = field(default_factory=list)

    @property
    def output_token_ids(self) -> list[int]:
        """vLLM's name for what was said."""
        return self.said

    @property
    def text(self) -> list[int]:
        """Prompt and what was said."""
        return self.prompt + self.said


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
        self.requests: dict[str, Scripted] = {}
        self.drafts: dict[str, list[int]] = {}
        self.runner = Runner(self)
        self.num_drafted = self.num_accepted = self.num_steps = 0

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
        self.num_steps += 1
        sampled = []
        for row, name in enumerate(self.req_ids):
            request, draft = self.requests[name], self.drafts.pop(name, [])
            new: list[int] = []
            if name not in prefilling:
                coming = request.output[len(request.said) :]
                agreed = next((k for k, (a, b) in enumerate(zip(draft, coming, strict=False)) if a != b), len(draft))
                new = coming[: min(agreed + 1, len(coming))]
                self.num_drafted += len(draft)
                self.num_accepted += len(new) - 1
            start = int(self.num_tokens_no_spec[row])
            self.token_ids_cpu[row, start : start + len(draft)] = draft  # as vLLM leaves them, also the rejected ones
            self.token_ids_cpu[row, start : start + len(new)] = new
            self.num_tokens_no_spec[row] = start + len(new)
            request.said += new
            sampled.append(new)
        return sampled

    def step(self, proposer: Any, prefilling: Collection[str] = ()) -> list[list[int]]:
        """Say that a step begins, sample, then ask for drafts; returns them."""
        proposer.on_step(self.runner, SimpleNamespace(finished_req_ids=set()))
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
