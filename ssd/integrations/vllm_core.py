"""The common parts of SSD's drafters for vLLM's two model runners: the cache, the running requests and the drafter."""

from __future__ import annotations

import bisect
import importlib
import multiprocessing.util
import weakref
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import xxhash

from ssd.config import DraftConfig
from ssd.drafting.row_texts import RowText
from ssd.errors import ConfigError, ModelError
from ssd.integrations.retrieval_cache import RetrievalCache, RetrievalStats
from ssd.integrations.settings import IntegrationSettings, read_settings
from ssd.integrations.vllm_hooks import TESTED_VERSIONS, log
from ssd.integrations.vllm_metrics import MetricsExport
from ssd.retrieval.segment import Tokens

if TYPE_CHECKING:
    from ssd.text.codec import TextCodec


class StopRules(NamedTuple):
    """The stop strings of a request and their options. Text after a stop string is not added to the cache."""

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
class ProposerStats(RetrievalStats):
    """The counters of SSD's drafter inside vLLM."""

    num_failures: int = 0
    """The number of exceptions in the drafter; requests continue without drafts."""


class VllmCache(RetrievalCache):
    """The retrieval cache inside one vLLM engine; ``ssd-serve`` with the same settings opens the same cache.

    It keeps no reference to vLLM's engine, so that it can still be closed after vLLM has deleted the engine.
    """

    text_type = VllmRequest
    texts: dict[str, VllmRequest]  # type: ignore[assignment]

    def __init__(self, vllm_config: Any, *, longest: int, **drafting: Any) -> None:
        """Open the cache and the drafter; ``drafting`` are further arguments of `BatchDrafter`.

        Raises:
            ConfigError: A setting is invalid.
            CacheError: The cache cannot be opened.
            ModelError: The settings share text with other processes, but the tokenizer cannot be loaded.
        """
        model, settings = vllm_config.model_config, read_settings(vllm_config)
        num_tokens = vllm_config.speculative_config.num_speculative_tokens
        self._codec = codec = _load_codec(model, settings)
        super().__init__(
            settings.cache_config(),
            vocab_size=int(model.get_vocab_size()),
            max_length=int(model.max_model_len),
            fingerprint=codec.fingerprint if codec else xxhash.xxh3_128_hexdigest(str(model.model).encode()),
            namespace=settings.namespace,
            warm_dirs=settings.warm_dirs,
            end_of_text_ids=codec.eos_token_ids if codec else (),
            draft=DraftConfig(num_speculative_tokens=num_tokens, max_match_length=settings.max_match_length),
            shared_vocab_size=codec.vocab_size if codec else None,
            longest=longest,
            **drafting,
        )
        log.info(
            "SSD drafts in this engine: up to %d tokens from namespace=%s cache_dir=%s redis=%s",
            num_tokens,
            settings.namespace,
            settings.cache_dir,
            settings.redis_url is not None,
        )

    def length_to_store(self, text: RowText, num_tokens: int | None) -> int:
        """Return how many tokens of an ended text are stored: those sent to the client, up to the first stop string."""
        assert isinstance(text, VllmRequest)
        end = super().length_to_store(text, text.num_sent if num_tokens is None else num_tokens)
        if text.stop_rules is None or self._codec is None:
            return end
        output_ids = text.tokens[text.prompt_length : end].tolist()
        return text.prompt_length + length_before_stop(self._codec, output_ids, text.stop_rules)


class VllmDrafter:
    """Base class of SSD's drafters for vLLM's two model runners (V1 and V2).

    Only the first rank of a tensor-parallel group drafts. In the other ranks, and after `close`, the cache ``_core`` is
    None.
    """

    def __init__(self, vllm_config: Any, *, longest: int, **drafting: Any) -> None:
        """Open the cache and the drafter, see `VllmCache`.

        Raises ConfigError for models with Mamba layers or linear attention, whose state vLLM would corrupt with drafts.
        """
        self._num_failures = 0
        self._last_stats, self._metrics = ProposerStats(), MetricsExport()
        self._core = VllmCache(vllm_config, longest=longest, **drafting) if should_draft(vllm_config) else None
        if self._core is not None:
            # Closed when vLLM drops its runner, and at exit; a forked worker runs only the first kind of finalizer.
            at_exit = multiprocessing.util.Finalize(None, self._core.close, exitpriority=10)
            self._close_core = weakref.finalize(self, at_exit)

    def stats(self) -> ProposerStats:
        if self._core is not None:
            self._last_stats = ProposerStats(**asdict(self._core.stats()), num_failures=self._num_failures)
        return self._last_stats

    def export_metrics(self) -> None:
        self._metrics.update(self.stats())

    def close(self) -> None:
        """Add the text of running requests to the cache, and stop drafting. May be called twice."""
        if self._core is not None:
            self._close_core()
            self.export_metrics()
            self._core = None

    def _record_failure(self, what: str) -> None:
        """Count the current exception and log it. The caller does not raise it, so that vLLM's requests continue."""
        self._num_failures += 1
        if self._num_failures.bit_count() == 1:  # the 1st, 2nd, 4th, 8th ... time
            log.exception(
                "%s failed (%d times so far): vLLM continues without this operation", what, self._num_failures
            )


def length_before_stop(codec: TextCodec, tokens: list[int], rules: StopRules) -> int:
    """Return the number of tokens up to the end of the first stop string; all tokens if there is none. O(n log n)."""

    def stops(count: int) -> bool:
        text = codec.decode(tokens[:count], skip_special_tokens=rules.skip_special_tokens)
        return any(text.find(string, start) >= 0 for string in rules.strings)

    first = min(rules.min_tokens, len(tokens))
    start = len(codec.decode(tokens[:first], skip_special_tokens=rules.skip_special_tokens))
    if not stops(len(tokens)):
        return len(tokens)
    return first + bisect.bisect_left(range(first, len(tokens)), True, key=stops)


def should_draft(vllm_config: Any) -> bool:
    """Return whether this process drafts; only the first rank of each tensor-parallel group does.

    Logs a warning if SSD was not tested with the installed version of vLLM.

    Raises:
        ConfigError: The model has Mamba layers or linear attention, whose state vLLM would corrupt with drafts.
    """
    model = vllm_config.model_config
    version = str(getattr(_module("vllm"), "__version__", TESTED_VERSIONS[0]))
    if getattr(model, "is_hybrid", False) or getattr(model, "is_attention_free", False):
        raise ConfigError(
            f"{model.model} keeps a running state (Mamba, linear attention). vLLM {version} corrupts this state "
            "if a step without draft follows an accepted draft (vLLM issue 39273, not fixed yet): serve the "
            "model without drafts"
        )
    if ".".join(version.split(".")[:2]) not in TESTED_VERSIONS:
        log.warning(
            "SSD was not tested with the installed vLLM %s, only with %s. If there are no drafts, install a "
            "tested version",
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
    """Load the tokenizer that the settings name, by default vLLM's. Returns None if it cannot be loaded.

    Raises ModelError instead if text is shared with other processes.
    """
    from ssd.text.codec import TextCodec
    from ssd.text.load_tokenizer import HubOptions

    name = settings.tokenizer or str(model.tokenizer or model.model)
    revision = None if settings.tokenizer else model.tokenizer_revision  # the revision belongs to vLLM's tokenizer only
    try:
        return TextCodec.load(name, HubOptions(revision=revision, trust_remote_code=model.trust_remote_code))
    except ModelError as error:
        if settings.is_shared:
            raise ModelError(
                f"the cache is shared, so its tokenizer must be known, but {error}. Set SSD_TOKENIZER or "
                'additional_config["ssd"]["tokenizer"] to the name of the tokenizer'
            ) from error
        log.warning(
            "the tokenizer cannot be loaded: %s. SSD does not know the end-of-text token, so drafts may "
            "continue after it; outputs are correct. Set SSD_TOKENIZER to a tokenizer that SSD can load",
            error,
        )
        return None
