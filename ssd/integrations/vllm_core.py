"""The common parts of SSD's drafters for vLLM's two model runners: the cache, the running requests and the drafter."""

from __future__ import annotations

import bisect
import importlib
import multiprocessing.util
import weakref
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import xxhash

from ssd.config import DraftConfig
from ssd.drafting.batch_drafter import BatchDrafter, RowText
from ssd.errors import ConfigError, ModelError
from ssd.integrations.settings import IntegrationSettings, read_settings
from ssd.integrations.vllm_hooks import TESTED_VERSIONS, log
from ssd.retrieval.cache_manager import CacheManager, NamespaceCache
from ssd.retrieval.segment import Tokens

if TYPE_CHECKING:
    from ssd.text.codec import TextCodec


class StopRules(NamedTuple):
    """The stop strings of a request, which determine the end of the text that is added to the cache."""

    strings: tuple[str, ...]
    min_tokens: int  # the number of output tokens before which they are ignored
    skip_special_tokens: bool  # whether special tokens are left out of the text that is searched


def stop_rules_of(params: Any) -> StopRules | None:
    strings = getattr(params, "stop", None)
    if not strings:
        return None
    given = (strings,) if isinstance(strings, str) else tuple(strings)
    return StopRules(given, params.min_tokens, params.skip_special_tokens)


class VllmRequest(RowText):
    """The prompt and output tokens of one vLLM request that the drafter has received so far."""

    __slots__ = ("num_sent", "stop_rules")

    def __init__(self, tokens: Tokens, prompt_length: int, room: int) -> None:
        super().__init__(tokens, prompt_length, room)
        self.num_sent: int | None = None  # tokens sent to the client, including the prompt, if vLLM reported it
        self.stop_rules: StopRules | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ProposerStats:
    """Counters of SSD's drafter inside vLLM, which begin at 0 when vLLM starts."""

    num_proposals: int = 0  # the number of drafts that were requested
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_learned: int = 0  # finished requests that were added to the cache
    num_failures: int = 0  # exceptions in the drafter; requests continue without drafts


class DrafterCore:
    """The cache, the drafter and the running requests of SSD inside one vLLM engine.

    The cache is opened as ``ssd-serve`` opens it with the same settings (files, warm-up directories, Redis). This
    object owns everything that must be closed, and keeps no reference to vLLM's engine.
    """

    def __init__(self, vllm_config: Any, *, longest: int, **drafting: Any) -> None:
        """Open the cache and the drafter; ``drafting`` are further arguments of `BatchDrafter`.

        Raises:
            ConfigError: A setting is invalid.
            CacheError: The cache cannot be opened.
            ModelError: The settings share text with other processes, but the tokenizer cannot be loaded.
        """
        model, settings = vllm_config.model_config, read_settings(vllm_config)
        draft = DraftConfig(
            num_speculative_tokens=vllm_config.speculative_config.num_speculative_tokens,
            max_match_length=settings.max_match_length,
        )
        vocab_size = int(model.get_vocab_size())
        self._max_length = int(model.max_model_len)
        self.requests: dict[str, VllmRequest] = {}  # the requests that have not ended, by vLLM's ids
        self.num_learned = 0
        self._codec = codec = _load_codec(model, settings)
        self.end_of_text_ids = frozenset(codec.eos_token_ids if codec else ())
        fingerprint = codec.fingerprint if codec else xxhash.xxh3_128_hexdigest(str(model.model).encode())
        config = settings.cache_config()
        with ExitStack() as opening:
            share = None
            if settings.redis_url is not None:
                from ssd.replication.replication_log import ReplicationLog  # requires redis-py, which is optional

                known = codec.vocab_size if codec else vocab_size
                replication_log = ReplicationLog(settings.redis_url, fingerprint=fingerprint, vocab_size=known)
                share = opening.enter_context(replication_log).attach
            caches = opening.enter_context(
                CacheManager(config, fingerprint, namespace=settings.namespace, on_open=share)
            )
            self.cache: NamespaceCache = caches.get()
            for directory in settings.warm_dirs:
                self.cache.add_prebuilt_directory(directory)
            self.drafter = BatchDrafter(
                longest=longest,
                max_length=self._max_length,
                vocab_size=vocab_size,
                end_of_text_ids=self.end_of_text_ids,
                max_match_length=draft.max_match_length,
                min_match_length=draft.min_match_length,
                learned=self.cache.learned,
                **drafting,
            )
            self.drafter.warm_up()
            self._resources = opening.pop_all()
        log.info(
            "SSD drafts up to %d tokens from namespace=%s cache_dir=%s redis=%s",
            draft.num_speculative_tokens,
            settings.namespace,
            settings.cache_dir,
            settings.redis_url is not None,
        )

    def start_request(self, name: str, tokens: Tokens, prompt_length: int) -> VllmRequest:
        """Register a vLLM request under its id; a request with the same id is replaced."""
        request = self.requests[name] = VllmRequest(tokens, min(prompt_length, len(tokens)), self._max_length)
        return request

    def pop_requests(self, names: Iterable[str]) -> list[VllmRequest]:
        return [request for name in names if (request := self.requests.pop(name, None)) is not None]

    def finish_requests(self, ended: list[VllmRequest]) -> None:
        if ended:
            self.drafter.clear()
            self._append_to_cache(ended)

    def close(self) -> None:
        """Add the text of running requests to the cache and close all resources. May be called twice."""
        self.drafter.publish()
        self._append_to_cache(self.pop_requests(list(self.requests)))
        self._resources.close()

    def _append_to_cache(self, ended: Iterable[VllmRequest]) -> None:
        """Add the text of each ended request to the cache, up to the last token that the client received. O(text)."""
        for request in ended:
            tokens = request.tokens if request.num_sent is None else request.tokens[: request.num_sent]
            # A draft may continue after an accepted end of text; the client does not get that part.
            start = min(len(tokens), request.length - request.num_new)
            last = tokens[start:].tolist()
            end = start + next((at + 1 for at, token in enumerate(last) if token in self.end_of_text_ids), len(last))
            if request.stop_rules is not None and self._codec is not None:
                output_ids = tokens[request.prompt_length : end].tolist()
                end = request.prompt_length + length_before_stop(self._codec, output_ids, request.stop_rules)
            if end <= request.prompt_length:
                continue  # nothing was generated
            self.cache.append(tokens[:end], prompt_length=request.prompt_length)
            self.num_learned += 1


class VllmDrafter:
    """Base class of SSD's drafters for vLLM's two model runners (V1 and V2).

    Only the first rank of a tensor-parallel group drafts; in other ranks and after `close`, ``_core`` is None.
    """

    def __init__(self, vllm_config: Any, *, longest: int, **drafting: Any) -> None:
        """Open the cache and the drafter, see `DrafterCore`.

        Raises ConfigError if drafting would make vLLM corrupt the model's state (Mamba, linear attention).
        """
        self._num_failures = 0
        self._last_stats = ProposerStats()
        self._core = DrafterCore(vllm_config, longest=longest, **drafting) if should_draft(vllm_config) else None
        if self._core is not None:
            # Closed when vLLM drops its runner, and at exit; a forked worker runs only the first kind of finalizer.
            at_exit = multiprocessing.util.Finalize(None, self._core.close, exitpriority=10)
            self._close_core = weakref.finalize(self, at_exit)

    def stats(self) -> ProposerStats:
        if (core := self._core) is not None:
            proposals, drafts, draft_tokens = core.drafter.counts
            self._last_stats = ProposerStats(
                num_proposals=proposals,
                num_drafts=drafts,
                num_draft_tokens=draft_tokens,
                num_learned=core.num_learned,
                num_failures=self._num_failures,
            )
        return self._last_stats

    def close(self) -> None:
        """Add the text of running requests to the cache, and stop drafting. May be called twice."""
        if self._core is not None:
            self._close_core()
            self.stats()
            self._core = None

    def _record_failure(self, what: str) -> None:
        """Count and log the current exception instead of raising it, because it must not affect vLLM's requests."""
        self._num_failures += 1
        if self._num_failures.bit_count() == 1:  # the 1st, 2nd, 4th, 8th ... time
            log.exception("%s failed, vLLM continues without it (%d times so far)", what, self._num_failures)


def length_before_stop(codec: TextCodec, tokens: list[int], rules: StopRules) -> int:
    """Return the number of tokens up to and including the token that completes the first stop string. O(n log n)."""

    def stops(count: int) -> bool:
        text = codec.decode(tokens[:count], skip_special_tokens=rules.skip_special_tokens)
        return any(text.find(string, start) >= 0 for string in rules.strings)

    first = min(rules.min_tokens, len(tokens))
    start = len(codec.decode(tokens[:first], skip_special_tokens=rules.skip_special_tokens))
    if not stops(len(tokens)):
        return len(tokens)
    return first + bisect.bisect_left(range(first, len(tokens)), True, key=stops)


def should_draft(vllm_config: Any) -> bool:
    """Return whether this process drafts, because it is the first rank of its tensor-parallel group.

    Logs a warning if SSD was not tested with the installed version of vLLM.

    Raises:
        ConfigError: Drafting would make vLLM corrupt the state of this model (Mamba, linear attention).
    """
    model = vllm_config.model_config
    version = str(getattr(_module("vllm"), "__version__", TESTED_VERSIONS[0]))
    if getattr(model, "is_hybrid", False) or getattr(model, "is_attention_free", False):
        raise ConfigError(
            f"{model.model} keeps a running state (Mamba, linear attention), which vLLM {version} corrupts if a step "
            "without draft follows an accepted draft (vLLM issue 39273, not fixed yet): serve the model without drafts"
        )
    if ".".join(version.split(".")[:2]) not in TESTED_VERSIONS:
        log.warning(
            "this is vLLM %s, but SSD was tested with %s. If vLLM's experimental interface differs, drafts may stop",
            version,
            ", ".join(f"{tested}.x" for tested in TESTED_VERSIONS),
        )
    return tensor_rank()[0] == 0


def tensor_rank() -> tuple[int, int]:
    try:
        group = importlib.import_module("vllm.distributed.parallel_state").get_tp_group()
        return int(group.rank_in_group), int(group.world_size)
    except (ImportError, AttributeError, AssertionError):  # missing or not initialised: there is one rank
        return 0, 1


def _module(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


def _load_codec(model: Any, settings: IntegrationSettings) -> TextCodec | None:
    """Load the tokenizer of vLLM's model. If it is missing, return None, or raise ModelError if text is shared."""
    from ssd.text.codec import TextCodec
    from ssd.text.load_tokenizer import HubOptions

    name = settings.tokenizer or str(model.tokenizer or model.model)
    revision = None if settings.tokenizer else model.tokenizer_revision  # the revision belongs to vLLM's tokenizer only
    try:
        return TextCodec.load(name, HubOptions(revision=revision, trust_remote_code=model.trust_remote_code))
    except ModelError as error:
        if settings.is_shared:
            raise ModelError(
                f"the cache is shared, so its tokenizer must be known, but {error}. Name the tokenizer with "
                'SSD_TOKENIZER or additional_config["ssd"]["tokenizer"]'
            ) from error
        log.warning("the tokenizer cannot be loaded, so the end-of-text token is unknown: %s", error)
        return None
