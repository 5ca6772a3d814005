"""Settings: immutable, keyword-only, and validated at construction."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from numbers import Integral, Real
from pathlib import Path
from typing import Literal, get_args

from ssd.errors import ConfigError, RequestError, quote_value
from ssd.token_rules import NO_RULES, TokenRules

DraftShape = Literal["auto", "chain", "tree"]
DRAFT_SHAPES: tuple[DraftShape, ...] = get_args(DraftShape)
SchedulingPolicy = Literal["fcfs", "priority"]
BatchInvariant = Literal["auto", "on", "off"]
BATCH_INVARIANT: tuple[BatchInvariant, ...] = get_args(BatchInvariant)
SCHEDULING_POLICIES: tuple[SchedulingPolicy, ...] = get_args(SchedulingPolicy)

GrammarKind = Literal["json_object", "json_schema", "regex", "choice", "grammar", "parts"]

MAX_LOGPROBS = 20
"""The maximum number of alternatives reported per token."""

MAX_SPECULATIVE_TOKENS = 128
"""The maximum number of draft tokens per step."""

MAX_COUPLED_STREAMS = 1 << 20
"""The maximum number of shared noise streams."""

MAX_INTERVAL_S = 86_400
"""The maximum time in seconds between two rebuilds."""


_MOST = (1 << 31) - 1
"""The maximum number of tokens, because counts have 32 bits."""


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ConfigError(message)


def _require_one_of(choices: tuple[str, ...], name: str, value: str) -> None:
    _require(value in choices, f"{name} must be one of {', '.join(choices)}, got {value!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexConfig:
    """The retrieval index of one namespace."""

    capacity_tokens: int = 1 << 22
    """The maximum number of tokens. The oldest are evicted, at most an eighth of the capacity at a time. Text that a
    later output repeated is retained, up to half of the capacity.
    """

    flush_tokens: int = 4096
    """The number of tokens at which the active segment is flushed."""

    rebuild_interval_s: float = 1.0
    """The maximum time in seconds between two flushes of a non-empty active segment, and between two searches for
    merges.
    """

    merge_fanout: int = 4
    """The number of neighbouring segments of one size class that are merged into one."""

    dedup_block_tokens: int = 64
    """Prompts are stored once in blocks of this many tokens, identified by a hash chain; 0 stores every prompt
    completely.
    """

    lead_in_tokens: int = 32
    """The number of tokens of an already stored prompt that are stored again before new text, so that contexts match
    it.
    """

    def __post_init__(self) -> None:
        _require(self.capacity_tokens >= 8, f"capacity_tokens must be >= 8, got {self.capacity_tokens}")
        _require(self.flush_tokens >= 1, f"flush_tokens must be >= 1, got {self.flush_tokens}")
        _require(
            0 < self.rebuild_interval_s <= MAX_INTERVAL_S,
            f"rebuild_interval_s must be > 0 and at most {MAX_INTERVAL_S}, a day, got {self.rebuild_interval_s}",
        )
        _require(self.merge_fanout >= 2, f"merge_fanout must be >= 2, got {self.merge_fanout}")
        _require(self.dedup_block_tokens >= 0, f"dedup_block_tokens must be >= 0, got {self.dedup_block_tokens}")
        _require(self.lead_in_tokens >= 0, f"lead_in_tokens must be >= 0, got {self.lead_in_tokens}")


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftConfig:
    """The options of drafting."""

    num_speculative_tokens: int = 64
    """The maximum number of draft tokens per step. 0 disables drafting.

    Drafts are as long as the expected gain exceeds the cost. The limit bounds the memory for draft positions in the KV
    cache and the widest verification pass.
    """

    max_match_length: int = 32
    """The maximum length of the context suffix that is looked up, in tokens."""

    min_match_length: int = 1
    """The minimum length of a match that is drafted from, in tokens."""

    draft_shape: DraftShape = "auto"
    """Whether a draft may branch if the next token is uncertain. "tree": yes, if the model runs on slot attention.
    "chain": no. "auto": only while a single sequence runs, for which trees measured faster.
    """

    recycling: bool = True
    """Whether drafts are made from the target's earlier candidates (token recycling): its most probable tokens after
    the same token or pair of tokens. This helps for new text.
    """

    retrieval: bool = True
    """Whether the context's suffixes are looked up in the request's own context, its prediction and the namespace's
    cache. Otherwise only other sources draft, which shows the contribution of each.
    """

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
    """The options of the engine."""

    max_num_seqs: int = 16
    """The maximum number of slots, which is the number of sequences decoded at once. There are fewer if memory is
    short.
    """

    max_model_len: int | None = None
    """The maximum number of prompt and output tokens. None: the model's limit."""

    prefill_chunk_tokens: int = 512
    """The maximum number of prompt tokens computed in one step, so that a long prompt does not stall other requests."""

    max_waiting: int = 1024
    """The maximum number of requests that wait for a slot; further ones are refused with QueueFull."""

    kv_cache_memory_bytes: int | None = None
    """The maximum memory of the KV cache. None: half of the free memory. If not all slots fit, there are fewer."""

    gpu_memory_utilization: float | None = None
    """Alternatively, the share of the device's memory (on a CPU: main memory) that may be in use including the KV
    cache. ``kv_cache_memory_bytes`` takes precedence.
    """

    enforce_eager: bool = False
    """Whether the target's kernels are launched one by one on CUDA too, instead of recorded CUDA graphs: slower, less
    memory.
    """

    batch_invariant: BatchInvariant = "auto"
    """Whether the logits of a position must be bit-identical in every pass, so that outputs do not depend on drafts and
    on other sequences. "auto": if the model allows it. "on": refuse the model otherwise. "off": each pass is as fast as
    possible.
    """

    enable_prefix_caching: bool = True
    """Whether slots keep their KV cache for requests of the same namespace, cache salt and tenant with the same prefix.
    """

    scheduling_policy: SchedulingPolicy = "fcfs"
    """The order of waiting requests. "fcfs": first come, first served; a priority other than 0 is refused. "priority":
    the request with the lowest ``priority`` first, which may also preempt a running one with a higher value; waiting
    requests gain priority over time. A client with low values can make others wait, so it is for clients that trust
    each other.
    """

    coupled_streams: int = 0
    """The number of noise streams that sampled requests without a seed share (docs/concepts/coupled-sampling.md).
    Earlier answers can then be drafted, and requests of one stream give the same answer to the same prompt. 0: each
    request has its own noise.
    """

    coupled_window: int = 8
    """The number of preceding tokens on which shared noise depends."""

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
        _require_one_of(BATCH_INVARIANT, "batch_invariant", self.batch_invariant)


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheConfig:
    """The retrieval cache: its directory and its sharing."""

    index: IndexConfig = field(default_factory=IndexConfig)
    directory: Path | None = None
    """The directory in which the cache is stored. None: it is lost when the process ends."""

    redis_url: str | None = None
    """The Redis server through which replicas with the same namespace share. None: nothing is shared."""


@dataclass(frozen=True, slots=True)
class StructuredOutput:
    """A constraint on the whole text of a completion."""

    kind: GrammarKind
    source: str = ""
    """"json_schema": a JSON schema. "regex": a regular expression in Rust's syntax. "choice": a JSON list of texts.
    "grammar": a Lark grammar. "json_object": empty. "parts": see `parts`.
    """
    param: str = field(default="structured_outputs", compare=False)
    """The client's name of the constraint, for messages."""

    @classmethod
    def parts(cls, lark: str, parts: Mapping[str, StructuredOutput], param: str) -> StructuredOutput:
        """Combine constraints by a Lark grammar whose rules refer to each of ``parts`` as ``@name``.

        No rule of the grammar may have one of these names.
        """
        written = {name: (part.kind, part.source) for name, part in parts.items()}
        return cls("parts", json.dumps({"lark": lark, "parts": written}), param)


_COUNTS = ("max_tokens", "top_k", "seed", "min_tokens", "logprobs", "prompt_logprobs")
_NUMBERS = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
_TUPLES = ("logit_bias", "stop", "stop_token_ids", "allowed_token_ids", "bad_words", "shown_special_ids")
_MAY_BE_NONE = {"max_tokens", "seed", "logprobs", "prompt_logprobs", "allowed_token_ids"}


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How one completion is sampled. Names and meanings are those of OpenAI and vLLM."""

    max_tokens: int | None = None
    """The maximum number of tokens to generate. None: up to the model's context."""
    temperature: float = 1.0
    """The sampling temperature; 0 is greedy."""
    top_p: float = 1.0
    top_k: int = 0
    """The number of most probable tokens that are sampled from; 0 or -1: all."""
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    """Pairs of token id and the number that is added to its logit."""
    seed: int | None = None
    """The seed. None: drawn for each request. Equal seeds give equal outputs for any drafts and any batch."""
    coupled: bool = True
    """Whether shared noise may be used if the engine has it. A seed takes precedence."""
    stop: tuple[str, ...] = ()
    """Strings that end the text. A single string may be given without a tuple."""
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    min_tokens: int = 0
    """The number of tokens before which end-of-text and stop tokens are not sampled."""
    allowed_token_ids: tuple[int, ...] | None = None
    """The only tokens that may be sampled. None: all."""
    bad_words: tuple[tuple[int, ...], ...] = ()
    """Token sequences that the output never contains: the last token of one is not sampled after the others."""
    structured_output: StructuredOutput | None = None
    """The constraint on the text. It takes precedence over ``allowed_token_ids``, and both over ``bad_words`` and
    ``min_tokens``: a weaker rule is ignored where it would leave no token.
    """
    skip_special_tokens: bool = True
    """Whether special tokens are left out of the text. The final end-of-text token is always left out."""
    shown_special_ids: tuple[int, ...] = ()
    """Special tokens that are in the text even so, because a parser needs them."""
    continues_prompt: bool = False
    """Whether the output continues the prompt's text. Otherwise some tokenizers drop its first space."""
    logprobs: int | None = None
    """The number of most probable tokens whose log-probabilities are reported in addition to each output token's. They
    are computed from float32 logits before bias, penalties, temperature and all other rules, as vLLM's are by default.
    """
    prompt_logprobs: int | None = None
    """The same for the prompt's tokens except its first."""
    drawn_logprobs: bool = False
    """Whether the log-probabilities of output tokens are instead those after all rules, temperature and truncation, as
    vLLM's ``processed_logprobs``. For greedy requests the temperature is 1.
    """
    _rules: TokenRules | None = field(default=None, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        def check(condition: bool, param: str, allowed: str) -> None:
            if not condition:
                raise RequestError(f"{param} must be {allowed}, got {quote_value(getattr(self, param))}", param=param)

        def check_each(wrong: Iterable[object], param: str, allowed: str) -> None:
            for each in wrong:
                raise RequestError(f"{param} must be {allowed}, got {quote_value(each)}", param=param)

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
        """Return bias, allowed tokens and bad words, prepared at the first call, because many take milliseconds."""
        if not self.logit_bias and self.allowed_token_ids is None and not self.bad_words:
            return NO_RULES
        rules = self._rules
        if rules is None:
            rules = TokenRules(self.logit_bias, self.allowed_token_ids, self.bad_words)
            object.__setattr__(self, "_rules", rules)
        return rules

    @property
    def greedy(self) -> bool:
        """Whether every token is the most probable one."""
        return self.temperature == 0.0
