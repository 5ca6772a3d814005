"""Engine steps and bare forwards of one shape, in turn; models of random weights, for the time of steps only."""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import AutoModelForCausalLM, DynamicCache, LlamaConfig, PreTrainedModel

from benchmarks.environment import model_name
from benchmarks.workloads import snippets
from ssd.config import DraftConfig, EngineConfig, SamplingParams
from ssd.drafting import Draft, DraftRequest
from ssd.drafting.protocol import EMPTY_DRAFT
from ssd.engine import Engine, Request
from ssd.model.kv.attention import ATTENTION_NAME
from ssd.model.loading.load_target import DTYPES, load_model
from ssd.model.sampling.sampler import PassOutput
from ssd.model.target import Target
from ssd.model.ways.slot_target import SlotTarget
from ssd.text.codec import TextCodec

SHAPES = {
    "tiny": LlamaConfig(
        vocab_size=512,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=4096,
    ),
    "1b": LlamaConfig(
        vocab_size=128_256,
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=16,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=131_072,
        tie_word_embeddings=True,
    ),
    "8b": LlamaConfig(
        vocab_size=128_256,
        hidden_size=4096,
        intermediate_size=14_336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=131_072,
    ),
}
"""The larger ones are cut as Llama 3.2 1B and Llama 3.1 8B: steps take what theirs take; what they say means nothing.
The tiny one is for a look at the scripts."""


_LOUD = 1000.0
"""Times that the embedding of a model that speaks is larger: a standard deviation of 20, beside some 8 that 32 layers
of random weights add.
"""


def random_model(shape: str, *, dtype: str, device: str, seed: int = 0, speaks: bool = False) -> PreTrainedModel:
    """A model of ``SHAPES[shape]`` whose weights are normal, made where they stay.

    speaks : whether each token clearly says which comes next. Scores of random weights lie so near to each other that
    passes of different width choose differently in bfloat16, and drafts of what was said before are rejected. Every
    token is followed by another one, so that text does not repeat itself; where input and output share their embedding
    it is followed by itself.
    """
    torch.manual_seed(seed)
    place = torch.device(("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device)
    kind = DTYPES["bfloat16" if place.type == "cuda" else "float32"] if dtype == "auto" else DTYPES[dtype]
    before = torch.get_default_dtype()
    torch.set_default_dtype(kind)
    try:
        with place:
            model: PreTrainedModel = AutoModelForCausalLM.from_config(deepcopy(SHAPES[shape]), dtype=kind)
    finally:
        torch.set_default_dtype(before)
    return _speaking(model.eval()) if speaks else model.eval()


@torch.no_grad()
def _speaking(model: PreTrainedModel) -> PreTrainedModel:
    embedding, output = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    if output is not embedding:
        size = len(output)
        place = torch.arange(size, device=output.device)
        # One cycle through the whole vocabulary: a step that has no factor in common with its size.
        step = next(step for step in range(int(size * 0.618), size) if math.gcd(step, size) == 1)
        output[(place + step) % size] = embedding[place]
    embedding *= _LOUD
    return model


Tokens = npt.NDArray[np.int32]

_TURN = 8
"""Steps, and then bare forwards, one after another."""


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


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds of steps, of the target's own call inside one and of what is around that, and of bare forwards.

    On a device that computes beside the host, the target's call is timed in steps of their own, which wait for it: no
    work of the host is hidden behind it there. ``outputs`` : what each row said. ``num_tokens`` : put out in the steps.
    """

    steps: list[float]
    targets: list[float]
    outside: list[float]
    forwards: list[float]
    outputs: list[list[int]]
    num_tokens: int


class KnownText:
    """Drafts what each request is known to say: every token is accepted, so steps differ in nothing but their width."""

    def __init__(self, known: Sequence[Sequence[int]], draft: int) -> None:
        self._known = [np.array(text, np.int32) for text in known]
        self._draft = draft

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        """The next ``draft`` tokens of each text."""
        drafts = []
        for request in requests:
            done = len(request.context) - request.prompt_length
            tokens = self._known[int(request.request_id)][done : done + min(self._draft, request.limit)]
            drafts.append(Draft(tokens, source="own") if len(tokens) else EMPTY_DRAFT)
        return drafts

    def observe(self, request_id: str, draft: Draft, num_accepted: int) -> None:
        """There is nothing to learn."""

    def finish(self, request_id: str) -> None:
        """There is nothing to forget."""


class TimedTarget:
    """A target that notes what its calls take, with ``waits`` the device included."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self.seconds = 0.0
        self.waits = True

    def __getattr__(self, name: str) -> Any:
        return getattr(self._target, name)

    def forward(self, *args: Any, **kwargs: Any) -> PassOutput:
        """The target's, timed."""
        began = time.perf_counter()
        output = self._target.forward(*args, **kwargs)
        if self.waits:
            synchronize(self._target.device)
        self.seconds += time.perf_counter() - began
        return output


def synchronize(device: torch.device) -> None:
    """Wait for what the device was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def tokens_said(rounds: int, width: int) -> int:
    """Most tokens that a row says in ``rounds`` timed steps, and in those that are not timed."""
    return (rounds + -(-rounds // (_TURN - 1)) + 1) * width


def time_steps(
    target: Target,
    prompts: Sequence[Tokens],
    shape: Shape,
    rounds: int,
    known: list[list[int]],
    library: PreTrainedModel | None,
) -> Timing:
    """``rounds`` steps of the engine over ``shape.batch`` of the prompts, and as many bare forwards, by turns.

    A turn is some of the one and then some of the other, the first of each not timed: it finds the caches full of what
    the other read.

    ``known`` : what each prompt's request says, as many tokens as `tokens_said`; with a draft of 0 it may be empty.
    ``library`` : the model of the bare forwards, as its library loads it; None makes none.
    """
    timed = TimedTarget(target)
    engine = Engine(
        timed,  # type: ignore[arg-type]
        drafter=KnownText(known, shape.draft),
        config=at_once(target, prompts),
        draft=DraftConfig(num_speculative_tokens=shape.draft),
    )
    num_tokens = tokens_said(rounds, shape.width)
    rows = Rows(engine, prompts[: shape.batch], num_tokens + 2)
    rows.read_prompts()
    forward = None if library is None else BareForward(library, shape, len(prompts[0]) + num_tokens // 2)
    steps: list[float] = []
    targets: list[float] = []
    outside: list[float] = []
    forwards: list[float] = []
    num_steps = put_out = 0
    while engine.has_work() and min(map(len, rows.outputs)) <= num_tokens - shape.width + 1:
        turn = num_steps % _TURN
        timed.seconds, timed.waits = 0.0, turn % 2 == 1
        began = time.perf_counter()
        new = rows.step()
        synchronize(target.device)
        took = time.perf_counter() - began
        if turn and (timed.waits or not target.runs_beside_host):
            targets.append(timed.seconds)
            outside.append(took - timed.seconds)
        if turn and not (timed.waits and target.runs_beside_host):
            steps.append(took)
            put_out += new
        num_steps += 1
        if turn == _TURN - 1 and forward is not None:
            forwards += [forward.seconds() for _ in range(_TURN)][1:]
    if forward is not None:
        forwards += [forward.seconds() for _ in range(len(steps) - len(forwards) + 1)][1:]
    return Timing(steps, targets, outside, forwards, rows.finish(), put_out)


class Rows:
    """A request for each prompt, greedy and as long as asked for, and what each has said so far in ``outputs``."""

    def __init__(self, engine: Engine, prompts: Sequence[Tokens], num_tokens: int) -> None:
        self._engine = engine
        self.outputs: list[list[int]] = [[] for _ in prompts]
        sampling = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
        for row, prompt in enumerate(prompts):
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


class BareForward:
    """The model as its library runs it: its own attention over a cache of its own, nothing around it."""

    def __init__(self, model: PreTrainedModel, shape: Shape, context: int) -> None:
        """``context`` : tokens of each row before the pass."""
        self._model = model
        vocab_size = model.config.get_text_config().vocab_size
        random = torch.Generator().manual_seed(0)
        tokens = torch.randint(3, vocab_size, (shape.batch, context + shape.width), generator=random).to(model.device)
        self._tokens = tokens[:, context:]
        self._cache = (
            DynamicCache()
        )  # without the configuration it keeps what lies beyond a window: its end can be cropped
        with torch.inference_mode(), OwnAttention(model):
            model(input_ids=tokens[:, :context], past_key_values=self._cache, use_cache=True, logits_to_keep=1)

    @torch.inference_mode()
    def seconds(self) -> float:
        """Of one pass; the cache is as before."""
        with OwnAttention(self._model):
            synchronize(self._model.device)
            began = time.perf_counter()
            self._model(input_ids=self._tokens, past_key_values=self._cache, use_cache=True)
            synchronize(self._model.device)
            took = time.perf_counter() - began
        self._cache.crop(-self._tokens.shape[1])
        return took


class OwnAttention:
    """The model's attention as transformers chooses it, for a while."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._was = model.config._attn_implementation

    def __enter__(self) -> None:
        if self._was == ATTENTION_NAME:
            self._model.set_attn_implementation("sdpa")

    def __exit__(self, *_: object) -> None:
        if self._was == ATTENTION_NAME:
            self._model.set_attn_implementation(ATTENTION_NAME)


def passes_of(target: Target) -> str:
    """How a target's passes are run, as it was opened."""
    if not isinstance(target, SlotTarget) or target.steps is None:
        return "plain"
    return target.steps.failure or target.steps.name


def weight_bytes(model: PreTrainedModel) -> int:
    """Bytes of the weights that a pass reads, each once; of a model that no target has been opened for."""
    weights: int = sum(p.numel() * p.element_size() for p in model.parameters())
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if embedding is not None and (head is None or embedding.weight is not head.weight):
        weights -= embedding.weight.numel() * embedding.weight.element_size()  # a few rows of it are read
    return weights


def cache_bytes(target: Target, shape: Shape) -> int:
    """Bytes of the KV cache that a pass reads at least: what the rows hold."""
    held = target.kv_cache.bytes_per_token if isinstance(target, SlotTarget) else 0
    return held * shape.batch * shape.context


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


def prompts_of(texts: Sequence[int] | None, vocab_size: int, num: int, length: int) -> list[Tokens]:
    """Different text for every row, int32[length] each: of ``texts``, over and over; random tokens where it is None."""
    if texts is None:
        random = np.random.default_rng(0)
        return [random.integers(3, vocab_size, length).astype(np.int32) for _ in range(num)]
    return list(np.resize(np.array(texts, np.int32), num * length).reshape(num, length))


def open_model(args: argparse.Namespace, *, speaks: bool = False) -> tuple[str, PreTrainedModel, list[int] | None]:
    """Name, model and text of what ``--shape`` or the model's argument asked for; random weights have no text."""
    if args.shape:
        model = random_model(args.shape, dtype=args.dtype, device=args.device, speaks=speaks)
        return f"random weights, shape {args.shape}", model, None
    codec = TextCodec.load(str(args.model))
    text = [token for snippet in snippets(0) for token in codec.encode_prompt(snippet)]
    return model_name(args.model), load_model(args.model, dtype=args.dtype, device=args.device), text
