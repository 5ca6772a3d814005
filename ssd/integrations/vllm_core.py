"""What our drafters for vLLM's two model runners share: a namespace, the requests on their way into it, a drafter."""

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
    """Strings that end an output, looked for behind its first ``min_tokens`` tokens."""

    strings: tuple[str, ...]
    min_tokens: int
    skip_special_tokens: bool


def stop_rules_of(params: Any) -> StopRules | None:
    """Of vLLM's sampling parameters; None where no string stops."""
    strings = getattr(params, "stop", None)
    if not strings:
        return None
    given = (strings,) if isinstance(strings, str) else tuple(strings)
    return StopRules(given, params.min_tokens, params.skip_special_tokens)


class Request(RowText):
    """What is known of one request.

    ``end`` : tokens that its client got, prompt included, where the engine said so. ``stop`` : what ended it besides.
    """

    __slots__ = ("end", "stop")

    def __init__(self, tokens: Tokens, prompt_length: int, room: int) -> None:
        super().__init__(tokens, prompt_length, room)
        self.end: int | None = None
        self.stop: StopRules | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ProposerStats:
    """Counters since the start."""

    num_proposals: int = 0
    """Rows that could have had a draft."""
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_learned: int = 0
    """Requests that ended and were given to the cache."""
    num_failures: int = 0
    """Failed calls; each cost drafts and nothing else."""


class Core:
    """Opened for one engine of vLLM: a namespace as ``ssd-serve`` with the same settings would open it (files, warm-up
    directories, Redis), the requests on their way into it, and a drafter. Holds all that must be closed, and nothing of
    the engine."""

    def __init__(self, vllm_config: Any, *, longest: int, **drafting: Any) -> None:
        """``longest`` : most tokens that are drafted at once. ``drafting`` : other settings of `BatchDrafter`.

        Raises ConfigError and CacheError, and ModelError where text is shared and the tokenizer cannot be loaded: what
        is wrong with the settings is to be heard at the start.
        """
        model, settings = vllm_config.model_config, read_settings(vllm_config)
        draft = DraftConfig(
            num_speculative_tokens=vllm_config.speculative_config.num_speculative_tokens,
            max_match_length=settings.max_match_length,
        )
        vocab_size = int(model.get_vocab_size())
        self._max_length = int(model.max_model_len)
        self.requests: dict[str, Request] = {}
        """Those that have not ended, by vLLM's ids."""
        self.num_learned = 0
        """Requests that were given to the cache."""
        self._codec = codec = _load_codec(model, settings)
        self.end_of_text_ids = frozenset(codec.eos_token_ids if codec else ())
        fingerprint = codec.fingerprint if codec else xxhash.xxh3_128_hexdigest(str(model.model).encode())
        config = settings.cache_config()
        with ExitStack() as opening:
            share = None
            if settings.redis_url is not None:
                from ssd.replication.replication_log import (
                    ReplicationLog,  # needs redis-py, which not everybody has installed
                )

                known = codec.vocab_size if codec else vocab_size
                log_of_replicas = ReplicationLog(settings.redis_url, fingerprint=fingerprint, vocab_size=known)
                share = opening.enter_context(log_of_replicas).attach
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
        log.info("SSD drafts up to %d tokens from namespace=%s cache_dir=%s redis=%s", draft.num_speculative_tokens,
                 settings.namespace, settings.cache_dir, settings.redis_url is not None)  # fmt: skip

    def begin(self, name: str, tokens: Tokens, prompt_length: int) -> Request:
        """A request of ``tokens``, int32[n], in place of one that had the id."""
        request = self.requests[name] = Request(tokens, min(prompt_length, len(tokens)), self._max_length)
        return request

    def forget(self, names: Iterable[str]) -> list[Request]:
        """The requests of these ids, as far as they are known, which have ended."""
        return [request for name in names if (request := self.requests.pop(name, None)) is not None]

    def end(self, ended: list[Request]) -> None:
        """These are over: learn them."""
        if ended:
            self.drafter.clear()
            self._learn(ended)

    def close(self) -> None:
        """Learn what is in flight, keep everything, and let go of files and connections. May be called twice."""
        self.drafter.publish()
        self._learn(self.forget(list(self.requests)))
        self._resources.close()

    def _learn(self, ended: Iterable[Request]) -> None:
        """Store each, as far as its client got it. O(text)."""
        for request in ended:
            tokens = request.tokens if request.end is None else request.tokens[: request.end]
            # A draft may run on behind an end of text that the target agreed with; nobody got to see that.
            start = min(len(tokens), request.length - request.num_new)
            last = tokens[start:].tolist()
            end = start + next((at + 1 for at, token in enumerate(last) if token in self.end_of_text_ids), len(last))
            if request.stop is not None and self._codec is not None:
                said = tokens[request.prompt_length : end].tolist()
                end = request.prompt_length + before_stop(self._codec, said, request.stop)
            if end <= request.prompt_length:
                continue  # nothing was said
            self.cache.append(tokens[:end], prompt_length=request.prompt_length)
            self.num_learned += 1


class VllmDrafter:
    """What is alike on both runners. The first rank of a tensor-parallel group drafts; others, and one that was closed,
    have no core."""

    def __init__(self, vllm_config: Any, *, longest: int, **drafting: Any) -> None:
        """As `Core`; raises ConfigError too for models whose state vLLM corrupts."""
        self._num_failures = 0
        self._last_stats = ProposerStats()
        self._core = Core(vllm_config, longest=longest, **drafting) if checked(vllm_config) else None
        if self._core is not None:
            # When vLLM drops its runner, and at the end of the process; a forked worker runs the first kind only.
            at_exit = multiprocessing.util.Finalize(None, self._core.close, exitpriority=10)
            self._close_core = weakref.finalize(self, at_exit)

    def stats(self) -> ProposerStats:
        """The counters as they are now, or as they were when it was closed."""
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
        """Learn what is in flight and close the cache; nothing is drafted any more. May be called twice."""
        if self._core is not None:
            self._close_core()
            self.stats()
            self._core = None

    def _note_failure(self, what: str) -> None:
        """Called where an exception was caught: whatever is wrong in here must not be the requests' problem."""
        self._num_failures += 1
        if self._num_failures.bit_count() == 1:  # the 1st, 2nd, 4th, 8th ... only
            log.exception("%s failed, the step goes on without (%d times so far)", what, self._num_failures)


def before_stop(codec: TextCodec, tokens: list[int], rules: StopRules) -> int:
    """How many of an output's tokens there are up to the one that completes the first stop string. O(n log n)."""

    def stops(count: int) -> bool:
        text = codec.decode(tokens[:count], skip_special_tokens=rules.skip_special_tokens)
        return any(text.find(string, start) >= 0 for string in rules.strings)

    first = min(rules.min_tokens, len(tokens))
    start = len(codec.decode(tokens[:first], skip_special_tokens=rules.skip_special_tokens))
    if not stops(len(tokens)):
        return len(tokens)
    return first + bisect.bisect_left(range(first, len(tokens)), True, key=stops)


def checked(vllm_config: Any) -> bool:
    """Whether this process is to draft: the first rank of its tensor-parallel group.

    Warns of a version that was not tested. Raises ConfigError for models whose state vLLM corrupts.
    """
    model = vllm_config.model_config
    version = str(getattr(_module("vllm"), "__version__", TESTED_VERSIONS[0]))
    if getattr(model, "is_hybrid", False) or getattr(model, "is_attention_free", False):
        raise ConfigError(
            f"{model.model} keeps a running state (Mamba, linear attention), which vLLM {version} corrupts in a step "
            "without a draft after an accepted one (its issue 39273, no release has a fix): serve it undrafted"
        )
    if ".".join(version.split(".")[:2]) not in TESTED_VERSIONS:
        log.warning(
            "vLLM %s: SSD was tested with %s. Its interface is experimental; where it differs, requests get no drafts",
            version, ", ".join(f"{tested}.x" for tested in TESTED_VERSIONS),
        )  # fmt: skip
    return tensor_rank()[0] == 0


def tensor_rank() -> tuple[int, int]:
    """This process's rank in its tensor-parallel group, and how many that has."""
    try:
        group = importlib.import_module("vllm.distributed.parallel_state").get_tp_group()
        return int(group.rank_in_group), int(group.world_size)
    except (ImportError, AttributeError, AssertionError):  # not there, or not initialised: there is one rank
        return 0, 1


def _module(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


def _load_codec(model: Any, settings: IntegrationSettings) -> TextCodec | None:
    """``model`` : vLLM's configuration of it. Raises ModelError where text is shared."""
    from ssd.text.codec import TextCodec
    from ssd.text.load_tokenizer import HubOptions

    name = settings.tokenizer or str(model.tokenizer or model.model)
    revision = None if settings.tokenizer else model.tokenizer_revision  # of vLLM's tokenizer, and of no other
    try:
        return TextCodec.load(name, HubOptions(revision=revision, trust_remote_code=model.trust_remote_code))
    except ModelError as error:
        if settings.is_shared:
            raise ModelError(
                f"the cache is shared, so what its ids mean must be known, but {error}. Name the tokenizer with "
                'SSD_TOKENIZER or additional_config["ssd"]["tokenizer"]'
            ) from error
        log.warning("no tokenizer, the end of text is not known: %s", error)
        return None
