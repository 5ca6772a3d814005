"""Engines that answer the same questions: without speculation, and with it, drawing with shared noise or their own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedModel

from benchmarks.exactness import differs
from benchmarks.sources.rounds import Tally, complete
from ssd.config import CacheConfig, DraftConfig, EngineConfig, SamplingParams
from ssd.drafting import make_drafter
from ssd.engine import Engine, Request
from ssd.engine.sequence import Coupling
from ssd.model.loading.load_target import load_model, open_target
from ssd.model.target import Target
from ssd.retrieval.cache import CacheSet
from ssd.text.codec import TextCodec

OFF = "off"
COUPLED = "coupled"
UNCOUPLED = "uncoupled"
NAMES = (OFF, COUPLED, UNCOUPLED)

BATCH = 8
"""Requests answered together where nothing is timed."""


@dataclass(frozen=True, slots=True)
class Question:
    """``stream`` : of the noise that it is drawn with where noise is coupled; ``seed`` : where it is not."""

    prompt: list[int]
    stream: int
    seed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How all answers of a workload are drawn."""

    temperature: float
    top_p: float
    max_tokens: int

    def params(self, seed: int | None) -> SamplingParams:
        """Of one request."""
        return SamplingParams(max_tokens=self.max_tokens, temperature=self.temperature, top_p=self.top_p, seed=seed)


@dataclass(slots=True)
class Comparison:
    """How outputs compare with speculation off."""

    num_tokens: int = 0
    num_mismatches: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """A model and the targets over it, one for each engine: an engine owns its slots."""

    model: PreTrainedModel
    codec: TextCodec
    targets: Mapping[str, Target]
    draft: DraftConfig

    @classmethod
    def open(cls, path: str | Path, *, max_length: int, limit: int, dtype: str, device: str) -> Opened:
        """``max_length`` : of prompt and answer. ``limit`` : most tokens of a draft. Raises ModelError."""
        model = load_model(path, dtype=dtype, device=device)
        draft = DraftConfig(num_speculative_tokens=limit)
        targets = {
            name: open_target(
                model,
                num_slots=BATCH,
                max_length=max_length,
                max_draft_tokens=limit,
                keeps_top=name != OFF and draft.recycling,
            )
            for name in NAMES
        }
        return cls(model=model, codec=TextCodec.load(str(path)), targets=targets, draft=draft)


class Contenders:
    """Engines of one window, with one secret for each scene. ``comparison`` : of everything they said."""

    def __init__(
        self, opened: Opened, *, num_streams: int, window: int, root: bytes, names: Sequence[str] = NAMES
    ) -> None:
        """``root`` : what secrets are made of. ``names`` : those that are asked."""
        self.codec = opened.codec
        self.comparison = Comparison()
        # Keys and values kept from another's answer would help whoever is asked next.
        config = EngineConfig(
            max_num_seqs=BATCH, coupled_streams=num_streams, coupled_window=window, enable_prefix_caching=False
        )
        self._coupling = Coupling(num_streams, window, lambda: root)
        self._engines = {
            name: Engine(
                opened.targets[name],
                drafter=make_drafter("none" if name == OFF else "ssd", opened.draft),
                codec=opened.codec,
                config=config,
                draft=opened.draft,
                noise_root=lambda: root,
            )
            for name in names
        }
        self._namespace = ""
        self._num_asked = 0
        for engine in self._engines.values():
            engine.warm_up()

    @contextmanager
    def scene(self, namespace: str) -> Iterator[None]:
        """Empty caches, and a namespace that has noise of its own."""
        self._namespace = namespace
        drafting = [engine for name, engine in self._engines.items() if name != OFF]
        with ExitStack() as stack:
            for engine in drafting:
                engine.caches = stack.enter_context(CacheSet(CacheConfig(), fingerprint=self.codec.fingerprint))
            yield
            for engine in drafting:
                engine.caches = None

    def ask(
        self, name: str, question: Question, sampling: Sampling, tally: Tally, *, is_coupled: bool = True
    ) -> list[int]:
        """What one engine answers, alone; and in ``tally`` what that took."""
        return complete(self._engines[name], self._request(question, sampling, is_coupled=is_coupled), tally)

    def ask_all(
        self, name: str, questions: Sequence[Question], sampling: Sampling, *, is_coupled: bool = True
    ) -> list[list[int]]:
        """What one engine answers, as many questions at a time as it has slots; then its cache holds them all."""
        engine = self._engines[name]
        answers: dict[str, list[int]] = {}
        for question in questions:
            request = self._request(question, sampling, is_coupled=is_coupled)
            answers[request.request_id] = []
            engine.submit(request)
        while engine.has_work():
            for output in engine.step():
                answers[output.request_id] += output.token_ids
        if engine.caches is not None:
            engine.caches.flush()
        return list(answers.values())

    def compare(
        self, question: Question, sampling: Sampling, got: list[int], want: list[int], *, is_coupled: bool = True
    ) -> None:
        """Count whether an output is what speculation off says, or not."""
        self.comparison.num_tokens += len(got)
        request = self._request(question, sampling, is_coupled=is_coupled)
        noise = self._coupling.noise_of(request, 0)
        target = self._engines[OFF].target
        self.comparison.num_mismatches += differs(target, question.prompt, request.sampling, got, want, noise)

    def _request(self, question: Question, sampling: Sampling, *, is_coupled: bool) -> Request:
        self._num_asked += 1
        return Request(
            request_id=str(self._num_asked),
            prompt_token_ids=tuple(question.prompt),
            sampling=sampling.params(None if is_coupled else question.seed),
            noise_stream=question.stream if is_coupled else None,
            namespace=self._namespace,
        )
