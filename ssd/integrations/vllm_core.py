"""What our drafters for vLLM's two model runners share: a namespace, the requests on their way into it, a drafter."""

from __future__ import annotations

import importlib
import multiprocessing.util
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import xxhash

from ssd.config import DraftConfig
from ssd.drafting.rows import RowDrafter
from ssd.errors import ConfigError, ModelError
from ssd.integrations.requests import Learner, OpenNamespace, Request, RequestTable
from ssd.integrations.settings import IntegrationSettings, read_settings
from ssd.integrations.vllm_hooks import TESTED_VERSIONS, log

if TYPE_CHECKING:
    from ssd.text.codec import TextCodec

D = TypeVar("D", bound=RowDrafter)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProposerStats:
    """Counters since the start."""

    num_proposals: int
    """Rows that could have had a draft."""
    num_drafts: int
    num_draft_tokens: int
    num_learned: int
    """Requests that ended and were given to the cache."""
    num_failures: int
    """Failed calls; each cost drafts and nothing else."""
    knows_ids: bool
    """Whether requests are known by vLLM's ids."""


class Failures:
    """Counts what went wrong in here: it must not be the request's problem."""

    def __init__(self) -> None:
        self.count = 0

    def note(self, what: str) -> None:
        """Call it where an exception was caught."""
        self.count += 1
        if self.count.bit_count() == 1:  # the 1st, 2nd, 4th, 8th ... only
            log.exception("%s failed, the step goes on without (%d times so far)", what, self.count)


class Core(Generic[D]):
    """Opened for one engine of vLLM; the first rank of a tensor-parallel group has one."""

    def __init__(self, vllm_config: Any, make: Callable[..., D]) -> None:
        """``make`` : the drafter, given all that `RowDrafter` takes but for its limit.

        Raises ConfigError and CacheError, and ModelError where text is shared and the tokenizer cannot be loaded.
        """
        model, settings = vllm_config.model_config, settings_of(vllm_config)
        draft = DraftConfig(
            num_speculative_tokens=vllm_config.speculative_config.num_speculative_tokens,
            max_match_length=settings.max_match_length,
        )
        vocab_size = int(model.get_vocab_size())
        codec = _load_codec(settings.tokenizer or model.tokenizer or model.model, settings)
        fingerprint = codec.fingerprint if codec else xxhash.xxh3_128_hexdigest(str(model.model).encode())
        namespace = OpenNamespace(
            settings, fingerprint=fingerprint, vocab_size=codec.vocab_size if codec else vocab_size
        )
        requests = RequestTable(patience=4 * _num_pipeline_stages(vllm_config))
        self.learner = Learner(namespace, requests, codec)
        self.requests = requests
        self.drafter: D = make(
            max_length=int(model.max_model_len),
            vocab_size=vocab_size,
            end_of_text_ids=self.learner.end_of_text_ids,
            max_match_length=draft.max_match_length,
            min_match_length=draft.min_match_length,
            learned=namespace.cache.learned,
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
            self.drafter.forget(ended)
            self.learner.learn(ended)

    def stats(self, failures: Failures, knows_ids: bool) -> ProposerStats:
        """The counters as they are now."""
        proposals, drafts, draft_tokens = self.drafter.counts
        return ProposerStats(
            num_proposals=proposals,
            num_drafts=drafts,
            num_draft_tokens=draft_tokens,
            num_learned=self.learner.num_learned,
            num_failures=failures.count,
            knows_ids=knows_ids,
        )


def _close(learner: Learner, drafter: RowDrafter) -> None:
    drafter.publish()
    learner.close()


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


def _num_pipeline_stages(vllm_config: Any) -> int:
    """Batches that are in the pipeline at once: a request is in every so many calls only."""
    return max(1, int(getattr(getattr(vllm_config, "parallel_config", None), "pipeline_parallel_size", 1)))


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
