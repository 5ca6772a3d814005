"""Steps of the engine under torch's profiler, each part of a step annotated."""

from __future__ import annotations

import gzip
import json
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from torch.profiler import ProfilerActivity, profile, record_function

from benchmarks.decode.steps import Shape, Tokens, at_once, synchronize
from benchmarks.profile.timeline import STEP, read_events, summary
from ssd.config import CacheConfig, DraftConfig, SamplingParams
from ssd.drafting.drafter import SuffixDrafter
from ssd.drafting.protocol import Draft, DraftRequest
from ssd.engine import Engine, Request
from ssd.engine.request import RequestOutput
from ssd.model.target import Target
from ssd.retrieval.cache import CacheSet

_UNTIMED_STEPS = 6
"""The first ones record shapes and fill caches."""


class AnnotatedEngine(Engine):
    """The engine; its parts are named in the profile."""

    def _admit_and_cancel(self) -> Any:
        with record_function("admit"):
            return super()._admit_and_cancel()

    def _prefill_prompts(self) -> Any:
        with record_function("prefill"):
            return super()._prefill_prompts()

    def _forward(self, *args: Any) -> None:
        with record_function("forward"):
            super()._forward(*args)

    def _verify(self) -> Any:
        with record_function("verify"):
            return super()._verify()

    def _commit(self, *args: Any) -> Any:
        with record_function("commit"):
            return super()._commit(*args)

    def _spell(self, *args: Any) -> RequestOutput | None:
        with record_function("spell"):
            return super()._spell(*args)


class KnownDrafter(SuffixDrafter):
    """Looks up and judges as the default drafter does, then drafts what each request is known to say.

    So a step costs the host what it costs, and every pass has the width that is asked for.
    """

    def __init__(self, known: Sequence[Sequence[int]], draft: int) -> None:
        super().__init__()
        self._known = [np.array(text, np.int32) for text in known]
        self._draft = draft

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        """``draft`` tokens for each request; the first, or any, where no more are known."""
        with record_function("propose"):
            super().propose(requests)
            drafts = []
            for request in requests:
                done = len(request.context) - request.prompt_length
                tokens = self._known[int(request.request_id)][done : done + self._draft]
                missing = np.full(self._draft - len(tokens), 7, np.int32)
                drafts.append(Draft(np.concatenate([tokens, missing])[: max(0, request.limit)], source="own"))
            return drafts


def profile_steps(
    target: Target, prompts: Sequence[Tokens], shape: Shape, rounds: int, profiled: int, trace: Path | None
) -> dict[str, Any]:
    """Of steps with that many rows and positions: milliseconds without the profiler, and what it saw of others.

    prompts : a row each. rounds : steps that are timed; profiled : steps after them, under the profiler. trace : where
    its trace goes, compressed with gzip.
    """
    num_tokens = (_UNTIMED_STEPS + rounds + profiled + 2) * shape.width
    known = _said(target, prompts, num_tokens) if shape.draft else [[] for _ in prompts]
    with CacheSet(CacheConfig(), fingerprint="0" * 32, inline=True) as caches:
        engine = AnnotatedEngine(
            target,
            drafter=KnownDrafter(known, shape.draft),
            caches=caches,
            config=at_once(target, prompts),
            # A step that only decodes asks its drafter too, and gets nothing.
            draft=DraftConfig(num_speculative_tokens=max(1, shape.draft)),
        )
        outputs = _submit(engine, prompts, num_tokens)
        while not all(outputs):
            _step(engine, outputs)
        for _ in range(_UNTIMED_STEPS):
            _step(engine, outputs)
        seconds = []
        for _ in range(rounds):
            began = time.perf_counter()
            _step(engine, outputs)
            seconds.append(time.perf_counter() - began)
        synchronize(target.device)
        activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (target.device.type == "cuda")
        with profile(activities=activities) as profiler:
            for _ in range(profiled):
                with record_function(STEP):
                    _step(engine, outputs)
            synchronize(target.device)
        while engine.has_work():
            for request in range(len(prompts)):
                engine.cancel(str(request))
            engine.step()
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "trace.json"
        profiler.export_chrome_trace(str(path))
        text = path.read_bytes()
    if trace is not None:
        trace.write_bytes(gzip.compress(text))
    said = summary(read_events(json.loads(text)))
    if target.device.type == "cuda" and "device_busy_ms" not in said:
        said["unseen"] = "the profiler was told of no kernel: what follows is the host's alone"
    return {
        "batch": shape.batch,
        "context": shape.context,
        "T": shape.width,
        "unprofiled_step_ms_p50": round(1e3 * median(seconds), 4),
        **said,
    }


def _said(target: Target, prompts: Sequence[Tokens], num_tokens: int) -> list[list[int]]:
    engine = Engine(target, drafter=SuffixDrafter(), config=at_once(target, prompts),
                    draft=DraftConfig(num_speculative_tokens=0))  # fmt: skip
    outputs = _submit(engine, prompts, num_tokens)
    while engine.has_work():
        _step(engine, outputs)
    return outputs


def _submit(engine: Engine, prompts: Sequence[Tokens], num_tokens: int) -> list[list[int]]:
    sampling = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
    for row, prompt in enumerate(prompts):
        engine.submit(Request(request_id=str(row), prompt_token_ids=tuple(prompt.tolist()), sampling=sampling))
    return [[] for _ in prompts]


def _step(engine: Engine, outputs: list[list[int]]) -> None:
    for output in engine.step():
        outputs[int(output.request_id)] += output.token_ids
