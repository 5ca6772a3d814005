"""Options of the library: immutable, keyword-only records that are validated at construction."""

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
"""The maximum of ``SamplingParams.logprobs``, the number of alternative tokens whose log-probabilities are reported."""

MAX_SPECULATIVE_TOKENS = 128
"""The maximum number of draft tokens per decoding step of a request."""

MAX_COUPLED_STREAMS = 1 << 20
"""The maximum of ``EngineConfig.coupled_streams``, the number of noise streams for coupled sampling."""

MAX_INTERVAL_S = 86_400
"""The maximum of ``IndexConfig.rebuild_interval_s``: one day, in seconds."""


_MAX_INT32 = (1 << 31) - 1
"""The maximum of options and token ids that are stored as 32-bit integers."""


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ConfigError(message)


def _require_one_of(choices: tuple[str, ...], name: str, value: str) -> None:
    _require(value in choices, f"{name} must be one of {', '.join(choices)}, got {value!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexConfig:
    """The options of a namespace's index: suffix arrays over earlier text, in which the drafter searches for drafts."""

    capacity_tokens: int = 1 << 22
    """The maximum number of tokens in the index. If it is full, the oldest segment, at most an eighth of the capacity,
    is evicted. Text of this segment that a later output repeated is kept; such text takes up to half of the capacity.
    """

    flush_tokens: int = 4096
    """The number of tokens at which the memtable, the newest part of the index, is written to a segment."""

    rebuild_interval_s: float = 1.0
    """The interval in seconds at which the memtable is written to a segment even if it is not full, and segments are
    merged.
    """

    merge_fanout: int = 4
    """The number of neighbouring segments of similar size that are merged into one, as in a log-structured merge tree.
    """

    dedup_block_tokens: int = 64
    """The block size in tokens for deduplicating prompts, as in a prefix cache: leading blocks of a prompt that are
    already stored are not stored again. With 0, every prompt is stored completely.
    """

    lead_in_tokens: int = 32
    """The number of already stored tokens that are stored again before new text. If the first blocks of a prompt are
    already stored, only the rest and these tokens before it are added. Without them, a search for a context across the
    border would find no match.
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
    """The options of drafting: which draft tokens are proposed for verification."""

    num_speculative_tokens: int = 64
    """The maximum number of draft tokens per decoding step of a request. 0 disables drafting.

    Most drafts are shorter, because a draft ends before the first token whose expected gain is less than its cost. The
    maximum determines the memory for draft positions in the KV cache.
    """

    max_match_length: int = 32
    """The maximum match length in tokens: at most this many tokens at the end of the context are looked up in earlier
    text.
    """

    min_match_length: int = 1
    """The minimum length in tokens of a match; shorter matches of the end of the context give no draft."""

    draft_shape: DraftShape = "auto"
    """The shape of drafts. "chain": sequences of tokens. "tree": trees, which branch where the next token is uncertain,
    if the model's runner can verify them. "auto": trees only while a single sequence runs, because trees were not
    faster in larger batches.
    """

    recycling: bool = True
    """Whether token recycling also makes drafts: it proposes the tokens that were most probable for the target after an
    earlier occurrence of the last one or two tokens. So text can be drafted that was never generated before.
    """

    retrieval: bool = True
    """Whether drafts are retrieved: the end of the context is looked up in the context itself, the client's prediction
    and the namespace's cache, and the text after a match is drafted. With False, only token recycling, draft heads and
    draft models make drafts, e.g. to measure them.
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
    """The options of the engine: memory, batching, scheduling and sampling noise."""

    max_num_seqs: int = 16
    """The maximum number of sequences that are decoded at once; it is reduced if the KV cache has too little memory."""

    max_model_len: int | None = None
    """The maximum number of prompt and output tokens of a request. None uses the model's limit."""

    prefill_chunk_tokens: int = 512
    """The maximum number of prompt tokens computed in one step, so that a long prompt does not stall other requests."""

    max_waiting: int = 1024
    """The maximum number of requests that wait to run; further requests are refused with QueueFull."""

    kv_cache_memory_bytes: int | None = None
    """The maximum memory of the KV cache in bytes. None uses half of the free memory. ``max_num_seqs`` is reduced if
    not all sequences fit.
    """

    gpu_memory_utilization: float | None = None
    """The share of the GPU's memory (on a CPU: of main memory) that may be in use in total, including the KV cache. It
    has no effect if ``kv_cache_memory_bytes`` is set.
    """

    enforce_eager: bool = False
    """Whether the model runs without CUDA graphs, as with vLLM's option: this is slower, but needs less memory."""

    batch_invariant: BatchInvariant = "auto"
    """Whether the logits of a position must be bit-identical in every forward pass (batch invariance), so that outputs
    do not depend on drafts or on other sequences. "auto": if the model allows it. "on": always; a model that does not
    allow it is refused. "off": no, so that the fastest kernels are used.
    """

    enable_prefix_caching: bool = True
    """Whether requests with the same prefix, namespace, cache salt and tenant reuse each other's KV cache."""

    scheduling_policy: SchedulingPolicy = "fcfs"
    """The order of waiting requests. "fcfs": first come, first served; a request with a priority other than 0 is
    refused. "priority": the request with the lowest ``priority`` value runs first and may preempt a running request
    with a higher value; waiting requests gain priority over time. Use "priority" only if clients trust each other,
    because a client that sends low values delays the others.
    """

    coupled_streams: int = 0
    """The number of noise streams for coupled sampling (docs/concepts/coupled-sampling.md); 0 disables it. Each sampled
    request without a seed uses one of the streams. Requests with the same stream and the same prompt generate the same
    answer, so that earlier answers can be drafted.
    """

    coupled_window: int = 8
    """The number of preceding tokens that determine the noise of the next token in coupled sampling."""

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
    """The options of the retrieval cache: its index, its directory and its sharing with other replicas."""

    index: IndexConfig = field(default_factory=IndexConfig)
    directory: Path | None = None
    """The directory in which the cache is stored. None keeps the cache in memory until the process ends."""

    redis_url: str | None = None
    """The URL of the Redis server through which replicas with the same namespace share text. None disables sharing."""


@dataclass(frozen=True, slots=True)
class StructuredOutput:
    """A constraint that the whole text of an output must satisfy, as in vLLM's structured outputs."""

    kind: GrammarKind
    source: str = ""
    """The constraint, in a format that depends on ``kind``. "json_schema": a JSON schema. "regex": a regular expression
    in Rust's syntax. "choice": a JSON list of texts. "grammar": a Lark grammar. "json_object": empty. "parts": the
    result of `StructuredOutput.parts`.
    """
    param: str = field(default="structured_outputs", compare=False)
    """The name of the request field in which the client sent the constraint; it is used in error messages."""

    @classmethod
    def parts(cls, lark: str, parts: Mapping[str, StructuredOutput], param: str) -> StructuredOutput:
        """Combine several constraints in one constraint: a Lark grammar that refers to them as ``@name``.

        Args:
            lark: The Lark grammar. None of its own rules may have the name of a constraint in ``parts``.
            parts: The constraints by name.
            param: The request field in which the client sent the constraint, for error messages.
        """
        written = {name: (part.kind, part.source) for name, part in parts.items()}
        return cls("parts", json.dumps({"lark": lark, "parts": written}), param)


_COUNTS = ("n", "max_tokens", "top_k", "seed", "min_tokens", "logprobs", "prompt_logprobs")
_NUMBERS = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
_TUPLES = ("logit_bias", "stop", "stop_token_ids", "allowed_token_ids", "bad_words", "shown_special_ids")
_MAY_BE_NONE = {"max_tokens", "seed", "logprobs", "prompt_logprobs", "allowed_token_ids"}


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """The parameters for sampling one output and for its log-probabilities, with OpenAI's and vLLM's names."""

    n: int = 1
    """The number of outputs per prompt. `ssd.LLM` accepts any number; a request to the engine itself must have 1."""
    max_tokens: int | None = None
    """The maximum number of tokens to generate. None allows as many as fit into the model's context."""
    temperature: float = 1.0
    """The sampling temperature. 0 selects greedy decoding."""
    top_p: float = 1.0
    top_k: int = 0
    """The number of most probable tokens from which the next token is sampled. 0 and -1 allow all tokens."""
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    """Pairs of a token id and the number that is added to the logit of this token at every position."""
    seed: int | None = None
    """The seed of the sampling noise. None chooses a random seed for each request. Requests with the same prompt,
    parameters and seed give the same output, independently of drafts and of other sequences in the batch.
    """
    coupled: bool = True
    """Whether the request takes part in coupled sampling, i.e. is sampled with noise that other requests share, so that
    earlier answers can be drafted. It has no effect with a ``seed`` or if ``EngineConfig.coupled_streams`` is 0.
    """
    stop: tuple[str, ...] = ()
    """Strings that end the text. A single string may be given without a tuple."""
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    min_tokens: int = 0
    """The minimum number of output tokens: before this number, end-of-text and stop tokens are not sampled."""
    allowed_token_ids: tuple[int, ...] | None = None
    """The ids of the only tokens that may be sampled. None allows all tokens."""
    bad_words: tuple[tuple[int, ...], ...] = ()
    """Token sequences that the output never contains. If the output ends with all tokens of a sequence but the last
    one, this last token is not sampled.
    """
    structured_output: StructuredOutput | None = None
    """The constraint that the whole text must satisfy. If other rules would then leave no token, they are ignored at
    this position: first ``allowed_token_ids`` if it contradicts the constraint, then ``bad_words`` and ``min_tokens``.
    """
    skip_special_tokens: bool = True
    """Whether special tokens are left out of the text. The final end-of-text token is always left out."""
    shown_special_ids: tuple[int, ...] = ()
    """The ids of special tokens that stay in the text even if ``skip_special_tokens`` is set, because a tool or
    reasoning parser needs them.
    """
    continues_prompt: bool = False
    """Whether the output continues the text of the prompt. Then a space at the beginning of the output is kept. Some
    tokenizers drop a space at the beginning of a text.
    """
    logprobs: int | None = None
    """The number k of alternative tokens: for each output token, its log-probability and those of the k most probable
    tokens are reported. They are computed from float32 logits before bias, penalties, temperature and all other rules,
    as by default in vLLM.
    """
    prompt_logprobs: int | None = None
    """The number k of alternative tokens: for each prompt token except the first, its log-probability and those of the
    k most probable tokens are reported.
    """
    drawn_logprobs: bool = False
    """Whether log-probabilities of output tokens are computed after penalties, temperature, truncation and all other
    rules, like vLLM's ``processed_logprobs``. For greedy requests no temperature and truncation are applied.
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
        check(1 <= self.n <= _MAX_INT32, "n", f"within 1..{_MAX_INT32}")
        check(self.max_tokens is None or 1 <= self.max_tokens <= _MAX_INT32, "max_tokens", f"within 1..{_MAX_INT32}")
        check(0.0 <= self.temperature <= 2.0, "temperature", "within 0..2")
        check(0.0 < self.top_p <= 1.0, "top_p", "greater than 0 and at most 1")
        check(-1 <= self.top_k <= _MAX_INT32, "top_k", f"within 1..{_MAX_INT32}, or 0 or -1 for off")
        check(0.0 <= self.min_p <= 1.0, "min_p", "within 0..1")
        # Outside this range, penalised logits underflow to 0 or overflow float32.
        check(0.01 <= self.repetition_penalty <= 100.0, "repetition_penalty", "within 0.01..100")
        check(-2.0 <= self.presence_penalty <= 2.0, "presence_penalty", "within -2..2")
        check(-2.0 <= self.frequency_penalty <= 2.0, "frequency_penalty", "within -2..2")
        wrong = (bias for _, bias in self.logit_bias if not -100.0 <= bias <= 100.0)
        check_each(wrong, "logit_bias", "within -100..100 for every token")
        check(self.seed is None or -(1 << 63) <= self.seed < (1 << 63), "seed", "a 64-bit integer")
        check_each((text for text in self.stop if not text), "stop", "non-empty strings")
        check(0 <= self.min_tokens <= _MAX_INT32, "min_tokens", f"within 0..{_MAX_INT32}")
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
            check_each((each for each in (least, most) if not 0 <= each <= _MAX_INT32), name, f"within 0..{_MAX_INT32}")
        for name, limit in (("logprobs", self.logprobs), ("prompt_logprobs", self.prompt_logprobs)):
            check(limit is None or 0 <= limit <= MAX_LOGPROBS, name, f"within 0..{MAX_LOGPROBS}")

    @property
    def rules(self) -> TokenRules:
        """The logit bias, allowed tokens and bad words as arrays for the sampler.

        They are built at the first access, which may take milliseconds.
        """
        if not self.logit_bias and self.allowed_token_ids is None and not self.bad_words:
            return NO_RULES
        rules = self._rules
        if rules is None:
            rules = TokenRules(self.logit_bias, self.allowed_token_ids, self.bad_words)
            object.__setattr__(self, "_rules", rules)
        return rules

    @property
    def greedy(self) -> bool:
        """Whether decoding is greedy, i.e. always chooses the most probable token, because the temperature is 0."""
        return self.temperature == 0.0
