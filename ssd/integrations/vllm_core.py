"""What our drafters for vLLM's two model runners share: a namespace, the requests on their way into it, a drafter."""

from __future__ import annotations

import importlib
import multiprocessing.util
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import xxhash

from ssd.config import DraftConfig
from ssd.drafting.rows import RowDrafter
from ssd.errors import ConfigError, ModelError
from ssd.integrations.requests import Learner, Request, RequestTable
from ssd.integrations.settings import IntegrationSettings, read_settings
from ssd.integrations.vllm_hooks import TESTED_VERSIONS, log

if TYPE_CHECKING:
    from ssd.text.codec import TextCodec


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
    """Opened for one engine of vLLM."""

    def __init__(self, vllm_config: Any, *, longest: int, **drafting: Any) -> None:
        """``longest`` : most tokens that are drafted at once. ``drafting`` : other settings of `RowDrafter`.

        Raises ConfigError and CacheError, and ModelError where text is shared and the tokenizer cannot be loaded.
        """
        model, settings = vllm_config.model_config, settings_of(vllm_config)
        draft = DraftConfig(
            num_speculative_tokens=vllm_config.speculative_config.num_speculative_tokens,
            max_match_length=settings.max_match_length,
        )
        vocab_size, max_length = int(model.get_vocab_size()), int(model.max_model_len)
        codec = _load_codec(settings.tokenizer or model.tokenizer or model.model, settings)
        self.requests = RequestTable(max_length)
        self.learner = Learner(
            settings, self.requests, codec,
            fingerprint=codec.fingerprint if codec else xxhash.xxh3_128_hexdigest(str(model.model).encode()),
            vocab_size=codec.vocab_size if codec else vocab_size,
        )  # fmt: skip
        self.drafter = RowDrafter(
            longest=longest,
            max_length=max_length,
            vocab_size=vocab_size,
            end_of_text_ids=self.learner.end_of_text_ids,
            max_match_length=draft.max_match_length,
            min_match_length=draft.min_match_length,
            learned=self.learner.cache.learned,
            **drafting,
        )
        self.drafter.warm_up()
        # Closed when vLLM drops its runner, and at the end of the process; a forked worker runs the first kind only.
        at_exit = multiprocessing.util.Finalize(None, _close, (self.learner, self.drafter), exitpriority=10)
        self.close = weakref.finalize(self, at_exit)
        """Learn what is in flight and close the cache. May be called twice."""
        log.info("SSD drafts up to %d tokens from namespace=%s cache_dir=%s redis=%s", draft.num_speculative_tokens,
                 settings.namespace, settings.cache_dir, settings.redis_url is not None)  # fmt: skip

    def end(self, ended: list[Request]) -> None:
        """These are over: learn them."""
        if ended:
            self.drafter.leave()
            self.learner.learn(ended)


def _close(learner: Learner, drafter: RowDrafter) -> None:
    drafter.publish()
    learner.close()


class VllmDrafter:
    """What is alike on both runners. The first rank of a tensor-parallel group drafts; others, and one that was closed,
    have no core."""

    def __init__(self, vllm_config: Any, *, longest: int, **drafting: Any) -> None:
        """As `Core`; raises ConfigError too for models whose state vLLM corrupts."""
        self._num_failures = 0
        self._last_stats = ProposerStats()
        self._core = Core(vllm_config, longest=longest, **drafting) if checked(vllm_config) else None

    def stats(self) -> ProposerStats:
        """The counters as they are now, or as they were when it was closed."""
        if (core := self._core) is not None:
            proposals, drafts, draft_tokens = core.drafter.counts
            self._last_stats = ProposerStats(
                num_proposals=proposals,
                num_drafts=drafts,
                num_draft_tokens=draft_tokens,
                num_learned=core.learner.num_learned,
                num_failures=self._num_failures,
            )
        return self._last_stats

    def close(self) -> None:
        """Learn what is in flight and close the cache; nothing is drafted any more. May be called twice."""
        if (core := self._core) is not None:
            core.close()
            self.stats()
            self._core = None

    def _note_failure(self, what: str) -> None:
        """Called where an exception was caught: whatever is wrong in here must not be the requests' problem."""
        self._num_failures += 1
        if self._num_failures.bit_count() == 1:  # the 1st, 2nd, 4th, 8th ... only
            log.exception("%s failed, the step goes on without (%d times so far)", what, self._num_failures)


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


def settings_of(vllm_config: Any) -> IntegrationSettings:
    """From the environment and the engine's ``additional_config``. Raises ConfigError."""
    additional = getattr(vllm_config, "additional_config", None)
    overrides = additional.get("ssd") if isinstance(additional, dict) else None
    if overrides is not None and not isinstance(overrides, dict):
        raise ConfigError(f'additional_config["ssd"] must be an object of settings, got {overrides!r}')
    settings = read_settings(overrides)
    parallel = getattr(vllm_config, "parallel_config", None)
    if settings.cache_dir is not None and getattr(parallel, "data_parallel_size", 1) > 1:
        return settings.below(f"rank-{getattr(parallel, 'data_parallel_rank', 0)}")
    return settings


def _load_codec(name: str, settings: IntegrationSettings) -> TextCodec | None:
    from ssd.text.codec import TextCodec

    try:
        return TextCodec.load(str(name))
    except ModelError as error:
        if settings.is_shared:
            raise ModelError(
                f"the cache is shared, so what its ids mean must be known, but {error}. Name the tokenizer with "
                'SSD_TOKENIZER or additional_config["ssd"]["tokenizer"]'
            ) from error
        log.warning("no tokenizer, the end of text is not known: %s", error)
        return None
