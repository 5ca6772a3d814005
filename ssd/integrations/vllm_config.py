"""What the proposer reads from vLLM's configuration and process."""

from __future__ import annotations

import importlib
import logging
from typing import TYPE_CHECKING, Any

from ssd.errors import ConfigError, ModelError
from ssd.integrations.settings import IntegrationSettings, read_settings

if TYPE_CHECKING:
    from ssd.text.codec import TextCodec

log = logging.getLogger(__name__)

TESTED_VERSIONS = ("0.32",)
"""Of vLLM, major and minor. Others get a warning in the log."""


def settings_of(vllm_config: Any) -> IntegrationSettings:
    additional = getattr(vllm_config, "additional_config", None)
    overrides = additional.get("ssd") if isinstance(additional, dict) else None
    if overrides is not None and not isinstance(overrides, dict):
        raise ConfigError(f'additional_config["ssd"] must be an object of settings, got {overrides!r}')
    settings = read_settings(overrides)
    parallel = getattr(vllm_config, "parallel_config", None)
    if settings.cache_dir is not None and getattr(parallel, "data_parallel_size", 1) > 1:
        return settings.below(f"rank-{getattr(parallel, 'data_parallel_rank', 0)}")
    return settings


def num_pipeline_stages(vllm_config: Any) -> int:
    """Batches that are in the pipeline at once: a request is in every so many calls only."""
    return max(1, int(getattr(getattr(vllm_config, "parallel_config", None), "pipeline_parallel_size", 1)))


def is_first_rank() -> bool:
    try:
        state = importlib.import_module("vllm.distributed.parallel_state")
        return int(state.get_tensor_model_parallel_rank()) == 0
    except (ImportError, AttributeError, AssertionError):  # not there, or not initialised: there is one rank
        return True


def load_codec(name: str, settings: IntegrationSettings) -> TextCodec | None:
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


def warn_if_untested() -> None:
    try:
        version = str(importlib.import_module("vllm").__version__)
    except (ImportError, AttributeError):
        return
    if ".".join(version.split(".")[:2]) not in TESTED_VERSIONS:
        log.warning(
            "vLLM %s: this proposer was tested with %s. Its interface is experimental; where it differs, requests get "
            "no drafts", version, ", ".join(f"{tested}.x" for tested in TESTED_VERSIONS),
        )  # fmt: skip
