"""Settings: frozen, keyword-only, checked once at construction."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from numbers import Integral, Real
from pathlib import Path
from typing import Literal, get_args

from ssd.errors import ConfigError, RequestError, shown
from ssd.token_rules import NO_RULES, TokenRules

DraftShape = Literal["auto", "chain", "tree"]
DRAFT_SHAPES: tuple[DraftShape, ...] = get_args(DraftShape)
SchedulingPolicy = Literal["fcfs", "priority"]
Exact = Literal["auto", "on", "off"]
EXACT: tuple[Exact, ...] = get_args(Exact)
SCHEDULING_POLICIES: tuple[SchedulingPolicy, ...] = get_args(SchedulingPolicy)

GrammarKind = Literal["json_object", "json_schema", "regex", "choice", "grammar", "parts"]

MAX_LOGPROBS = 20
"""Most alternatives that are reported beside a token."""

MAX_SPECULATIVE_TOKENS = 128
"""Longest draft."""

MAX_COUPLED_STREAMS = 1 << 20
"""Most streams of coupled noise."""

MAX_INTERVAL_S = 86_400
"""Longest time between two rebuilds."""


_MOST = (1 << 31) - 1
"""Counts of tokens are kept in 32 bits."""


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ConfigError(message)


def _require_one_of(choices: tuple[str, ...], name: str, value: str) -> None:
    _require(value in choices, f"{name} must be one of {', '.join(choices)}, got {value!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexConfig:
    """The retrieval index of one namespace."""

    capacity_tokens: int = 1 << 22
    """Most tokens kept; the oldest are evicted, at most an eighth of this at a time, but for what a later output said
    again: that stays, up to half of the capacity."""

    seal_tokens: int = 4096
    """The tail is sealed into a segment once it holds this many tokens."""

    rebuild_interval_s: float = 1.0
    """A non-empty tail is sealed at the latest this many seconds after the last seal; merges are sought as often."""

    merge_fanout: int = 4
    """This many neighbouring segments of one size class are merged into one."""

    dedup_block_tokens: int = 64
    """Prompt blocks of this many tokens are hashed in a chain and stored once; 0 stores every prompt whole."""

    lead_in_tokens: int = 32
    """Tokens of an already stored prompt that are stored again before new text, so that it can be matched."""

    def __post_init__(self) -> None:
        _require(self.capacity_tokens >= 8, f"capacity_tokens must be >= 8, got {self.capacity_tokens}")
        _require(self.seal_tokens >= 1, f"seal_tokens must be >= 1, got {self.seal_tokens}")
        _require(
            0 < self.rebuild_interval_s <= MAX_INTERVAL_S,
            f"rebuild_interval_s must be > 0 and at most {MAX_INTERVAL_S}, a day, got {self.rebuild_interval_s}",
        )
        _require(self.merge_fanout >= 2, f"merge_fanout must be >= 2, got {self.merge_fanout}")
        _require(self.dedup_block_tokens >= 0, f"dedup_block_tokens must be >= 0, got {self.dedup_block_tokens}")
        _require(self.lead_in_tokens >= 0, f"lead_in_tokens must be >= 0, got {self.lead_in_tokens}")


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftConfig:
    """How drafts are made."""

    num_speculative_tokens: int = 64
    """Draft limit: most tokens per draft. The target scores one position more per step. 0 switches drafting off.

    Drafts are as long as pays; the limit only bounds the KV cache's slack and the widest pass."""

    max_match_length: int = 32
    """Longest tail of the context that is looked up, in tokens."""

    min_match_length: int = 1
    """Shorter matches are not drafted from."""

    draft_shape: DraftShape = "auto"
    """Whether a draft may branch where the next token is uncertain. "tree": where the model runs on slot attention;
    else drafts are chains. "auto": trees while one sequence runs alone, which is where they measured better."""

    recycling: bool = True
    """Whether drafts are made of what the target held likely before, after the same token or pair of tokens: its most
    probable tokens of every scored position, and its choices behind a wrong token. It helps where text is new."""

    retrieval: bool = True
    """Whether the context's end is looked up in the request's own text, its prediction and what its namespace has
    learned. Without, only what other sources offer is drafted: to see what each brings."""

    def __post_init__(self) -> None:
        _require(
            0 <= self.num_speculative_tokens <= MAX_SPECULATIVE_TOKENS,
            f"num_speculative_tokens must be within 0..{MAX_SPECULATIVE_TOKENS}, got {self.num_speculative_tokens}",
        )
        _require(
            1 <= self.max_match_length <= 256, f"max_match_length must be within 1..256, got {self.max_match_length}"
        )
        _require(
            1 <= self.min_match_length <= self.max_match_length,
            f"min_match_length must be within 1..max_match_length, got {self.min_match_length}",
        )
        _require_one_of(DRAFT_SHAPES, "draft_shape", self.draft_shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """The serving loop."""

    max_num_seqs: int = 16
    """Most slots: sequences decoded together. There are fewer where memory lacks."""

    max_model_len: int | None = None
    """Longest prompt plus output in tokens; None takes the model's own limit."""

    prefill_chunk_tokens: int = 512
    """Most prompt tokens computed in one step, so that a long prompt does not stall the others."""

    max_waiting: int = 1024
    """Most requests that wait for a slot; one more is refused with QueueFull."""

    kv_cache_memory_bytes: int | None = None
    """Most memory of the KV cache; None takes half of what is free. Where not all slots fit there are fewer."""

    gpu_memory_utilization: float | None = None
    """Instead: share of the device's memory, on a CPU of main memory, that may be in use once the KV cache has its own,
    whatever uses the rest. ``kv_cache_memory_bytes`` goes before it."""

    enforce_eager: bool = False
    """Launch every kernel of the target from Python, on CUDA too: slower, but without the memory of recorded graphs."""

    exact: Exact = "auto"
    """Whether a position's logits must be the same bits in every pass, so that outputs are equal to the bit whatever is
    drafted and whatever else is decoded. "auto": where they can be. "on": or the model is not opened. "off": each pass
    as fast as it can be alone."""

    enable_prefix_caching: bool = True
    """Slots keep their keys and values, and requests of the same namespace, cache salt and tenant go on with them."""

    scheduling_policy: SchedulingPolicy = "fcfs"
    """Who gets a slot first. "fcfs": who came first; a priority other than 0 is refused. "priority": the request of the
    lowest ``priority``, which may also take a slot from a running one of a higher; those that wait move up with time.
    It lets whoever asks for a low one keep the others waiting: for clients that trust each other."""

    coupled_streams: int = 0
    """Streams of noise that sampled requests without a seed share, see ``docs/coupled-sampling.md``: what was answered
    before can be drafted, and requests of one stream say the same to the same prompt. 0: each has noise of its own."""

    coupled_window: int = 8
    """Tokens before a token that coupled noise depends on."""

    def __post_init__(self) -> None:
        _require(self.max_num_seqs >= 1, f"max_num_seqs must be >= 1, got {self.max_num_seqs}")
        _require(
            self.max_model_len is None or self.max_model_len >= 2,
            f"max_model_len must be >= 2, got {self.max_model_len}",
        )
        _require(self.prefill_chunk_tokens >= 1, f"prefill_chunk_tokens must be >= 1, got {self.prefill_chunk_tokens}")
        _require(self.max_waiting >= 0, f"max_waiting must be >= 0, got {self.max_waiting}")
        _require(
            self.kv_cache_memory_bytes is None or self.kv_cache_memory_bytes >= 1,
            f"kv_cache_memory_bytes must be >= 1, got {self.kv_cache_memory_bytes}",
        )
        most = MAX_COUPLED_STREAMS
        _require(
            0 <= self.coupled_streams <= most, f"coupled_streams must be within 0..{most}, got {self.coupled_streams}"
        )
        _require(1 <= self.coupled_window <= 64, f"coupled_window must be within 1..64, got {self.coupled_window}")
        share = self.gpu_memory_utilization
        _require(share is None or 0 < share <= 1, f"gpu_memory_utilization must be above 0 and at most 1, got {share}")
        _require_one_of(SCHEDULING_POLICIES, "scheduling_policy", self.scheduling_policy)
        _require_one_of(EXACT, "exact", self.exact)


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheConfig:
    """Where the cache lives and whom it is shared with."""

    index: IndexConfig = field(default_factory=IndexConfig)
    directory: Path | None = None
    """Durable home of the cache; None keeps nothing beyond the process."""

    redis_url: str | None = None
    """Replicas with the same URL and namespace learn from each other; None shares nothing."""


@dataclass(frozen=True, slots=True)
class StructuredOutput:
    """What the text of a completion must look like, from its first character to its end."""

    kind: GrammarKind
    source: str = ""
    """"json_schema": a JSON schema. "regex": a regular expression, of Rust's dialect. "choice": a JSON list of texts.
    "grammar": a Lark grammar. "json_object": nothing. "parts": see `parts`."""
    param: str = field(default="structured_outputs", compare=False)
    """What the client called it, for errors."""

    @classmethod
    def parts(cls, lark: str, parts: Mapping[str, StructuredOutput], param: str) -> StructuredOutput:
        """A Lark grammar, whose rules name each of ``parts`` as ``@name``: names that are not the grammar's own."""
        written = {name: (part.kind, part.source) for name, part in parts.items()}
        return cls("parts", json.dumps({"lark": lark, "parts": written}), param)


_COUNTS = ("max_tokens", "top_k", "seed", "min_tokens", "logprobs", "prompt_logprobs")
_NUMBERS = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
_TUPLES = ("logit_bias", "stop", "stop_token_ids", "allowed_token_ids", "bad_words", "shown_special_ids")
_MAY_BE_NONE = {"max_tokens", "seed", "logprobs", "prompt_logprobs", "allowed_token_ids"}


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How one completion is sampled. Names and meanings are OpenAI's and vLLM's."""

    max_tokens: int | None = None
    """Most tokens to generate; None generates up to the model's context."""
    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    top_k: int = 0
    """0 or -1: off."""
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    """Pairs (token id, added to its logit)."""
    seed: int | None = None
    """None draws a seed for the request. One seed gives one output, whatever the drafts and the batch."""
    coupled: bool = True
    """Whether it may draw with noise that other requests share, where the engine has any; a seed goes before it."""
    stop: tuple[str, ...] = ()
    """Strings that end the text; one alone may be given as it is."""
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    min_tokens: int = 0
    """End-of-text and stop tokens are not sampled before this many tokens."""
    allowed_token_ids: tuple[int, ...] | None = None
    """Only these are sampled; None: all."""
    bad_words: tuple[tuple[int, ...], ...] = ()
    """Token sequences that the output never contains: the last token of one is not sampled after the others."""
    structured_output: StructuredOutput | None = None
    """Only tokens that keep the text within this grammar are sampled. It goes before ``allowed_token_ids``, and both go
    before ``bad_words`` and ``min_tokens``: a weaker rule that would leave no token is not applied there."""
    skip_special_tokens: bool = True
    """Special tokens of the output give no text; an end of text that ends it never does."""
    shown_special_ids: tuple[int, ...] = ()
    """Special tokens that give text all the same: what a reader of the text looks for."""
    continues_prompt: bool = False
    """The output is a text that goes on, and not one of its own: some tokenizers leave the first space of those out."""
    logprobs: int | None = None
    """Report each output token's log-probability and those of this many most probable tokens. They are the model's own:
    of float32 logits before bias, penalties, temperature and everything else here, as vLLM's are by default."""
    prompt_logprobs: int | None = None
    """The same for the prompt's tokens, but its first."""
    drawn_logprobs: bool = False
    """Report instead, of output tokens, the log-probabilities that they are drawn with: after all rules, temperature
    and truncation, as vLLM's ``processed_logprobs``. Greedy ones are of temperature 1."""
    _rules: TokenRules | None = field(default=None, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        def check(condition: bool, param: str, allowed: str) -> None:
            if not condition:
                raise RequestError(f"{param} must be {allowed}, got {shown(getattr(self, param))}", param=param)

        def check_each(wrong: Iterable[object], param: str, allowed: str) -> None:
            for each in wrong:
                raise RequestError(f"{param} must be {allowed}, got {shown(each)}", param=param)

        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        for name in _COUNTS:
            value = getattr(self, name)
            check(isinstance(value, Integral) or (value is None and name in _MAY_BE_NONE), name, "an integer")
        for name in _NUMBERS:
            check(isinstance(getattr(self, name), Real), name, "a number")
        for name in _TUPLES:
            value = getattr(self, name)
            check(isinstance(value, tuple | list) or (value is None and name in _MAY_BE_NONE), name, "a list")
            if isinstance(value, list):
                object.__setattr__(self, name, tuple(value))
        check(all(isinstance(text, str) for text in self.stop), "stop", "a string or a list of strings")
        check(self.max_tokens is None or 1 <= self.max_tokens <= _MOST, "max_tokens", f"within 1..{_MOST}")
        check(0.0 <= self.temperature <= 2.0, "temperature", "within 0..2")
        check(0.0 < self.top_p <= 1.0, "top_p", "greater than 0 and at most 1")
        check(-1 <= self.top_k <= _MOST, "top_k", f"within 1..{_MOST}, or 0 or -1 for off")
        check(0.0 <= self.min_p <= 1.0, "min_p", "within 0..1")
        # Beyond, a penalised logit is 0 or leaves float32.
        check(0.01 <= self.repetition_penalty <= 100.0, "repetition_penalty", "within 0.01..100")
        check(-2.0 <= self.presence_penalty <= 2.0, "presence_penalty", "within -2..2")
        check(-2.0 <= self.frequency_penalty <= 2.0, "frequency_penalty", "within -2..2")
        wrong = (bias for _, bias in self.logit_bias if not -100.0 <= bias <= 100.0)
        check_each(wrong, "logit_bias", "within -100..100 for every token")
        check(self.seed is None or -(1 << 63) <= self.seed < (1 << 63), "seed", "a 64-bit integer")
        check_each((text for text in self.stop if not text), "stop", "non-empty strings")
        check(0 <= self.min_tokens <= _MOST, "min_tokens", f"within 0..{_MOST}")
        check(self.allowed_token_ids != (), "allowed_token_ids", "at least one token id")
        check(all(self.bad_words), "bad_words", "of at least one token each")
        for name, ids in (
            ("logit_bias", [token for token, _ in self.logit_bias]),
            ("stop_token_ids", self.stop_token_ids),
            ("allowed_token_ids", self.allowed_token_ids or ()),
            ("bad_words", [token for word in self.bad_words for token in word]),
            ("shown_special_ids", self.shown_special_ids),
        ):
            least, most = (min(ids), max(ids)) if ids else (0, 0)
            check_each((each for each in (least, most) if not 0 <= each <= _MOST), name, f"within 0..{_MOST}")
        for name, limit in (("logprobs", self.logprobs), ("prompt_logprobs", self.prompt_logprobs)):
            check(limit is None or 0 <= limit <= MAX_LOGPROBS, name, f"within 0..{MAX_LOGPROBS}")

    @property
    def rules(self) -> TokenRules:
        """Bias, allowed tokens and bad words, made ready at the first call: many take milliseconds."""
        if not self.logit_bias and self.allowed_token_ids is None and not self.bad_words:
            return NO_RULES
        rules = self._rules
        if rules is None:
            rules = TokenRules(self.logit_bias, self.allowed_token_ids, self.bad_words)
            object.__setattr__(self, "_rules", rules)
        return rules

    @property
    def greedy(self) -> bool:
        """True when every token is the most probable one."""
        return self.temperature == 0.0
