"""Settings of the drafter inside vLLM, from environment variables and from vLLM's own configuration."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from ssd.config import CacheConfig, IndexConfig
from ssd.errors import ConfigError
from ssd.retrieval.cache_manager import DEFAULT_NAMESPACE
from ssd.retrieval.files import check_namespace

ENVIRONMENT_PREFIX = "SSD_"


@dataclass(frozen=True, slots=True, kw_only=True)
class IntegrationSettings:
    """The settings of SSD's drafter in vLLM and SGLang.

    They come from environment variables ``SSD_<NAME>``, or in vLLM from the object "ssd" in ``additional_config``.
    """

    cache_dir: Path | None = None
    """The directory in which the cache is stored; None keeps it in memory."""

    redis_url: str | None = None
    """The URL of the Redis server through which servers with the same tokenizer and namespace share text."""

    namespace: str = DEFAULT_NAMESPACE
    """The name of the cache (namespace) that this server reads and extends."""

    capacity_tokens: int = IndexConfig().capacity_tokens
    """The maximum number of tokens in the cache."""

    rebuild_interval_s: float = IndexConfig().rebuild_interval_s
    """The maximum number of seconds before new text is written to a segment, an immutable file of the cache."""

    warm_dirs: tuple[Path, ...] = ()
    """Directories made by ``ssd-cache build``; the environment variable separates them like the entries of ``PATH``."""

    max_match_length: int = 32
    """The maximum number of tokens at the end of the context that are looked up in the cache."""

    tokenizer: str | None = None
    """The tokenizer of the cached token ids: a directory, a ``tokenizer.json`` or a model id. None uses vLLM's."""

    def __post_init__(self) -> None:
        check_namespace(self.namespace)

    @property
    def is_shared(self) -> bool:
        """Whether text is exchanged with other processes or runs, so that all of them must use the same tokenizer."""
        return self.cache_dir is not None or self.redis_url is not None or bool(self.warm_dirs)

    def cache_config(self) -> CacheConfig:
        index = IndexConfig(capacity_tokens=self.capacity_tokens, rebuild_interval_s=self.rebuild_interval_s)
        return CacheConfig(index=index, directory=self.cache_dir, redis_url=self.redis_url)


def read_settings(vllm_config: Any) -> IntegrationSettings:
    """Read the settings from the environment and from vLLM's ``additional_config``, which takes precedence.

    Raises:
        ConfigError: A setting is unknown or has an invalid value.
    """
    additional = getattr(vllm_config, "additional_config", None)
    given = additional.get("ssd") if isinstance(additional, dict) else None
    given = {} if given is None else given
    if not isinstance(given, dict):
        raise ConfigError(f'additional_config["ssd"] must be an object of settings, got {given!r}')
    if unknown := sorted(map(str, given.keys() - _SETTING_TYPES.keys())):
        raise ConfigError(
            f'additional_config["ssd"] has unknown settings ({", ".join(unknown)}): use '
            f"{', '.join(sorted(_SETTING_TYPES))}"
        )
    values: dict[str, Any] = {}
    for name, kind in sorted(_SETTING_TYPES.items()):
        variable = ENVIRONMENT_PREFIX + name.upper()
        if given.get(name) is not None:
            values[name] = kind.read(name, given[name])
        elif value := os.environ.get(variable):
            values[name] = kind.read(variable, value)
    parallel = getattr(vllm_config, "parallel_config", None)
    # A directory has one writer, so each engine of a data-parallel group gets its own. Without expert parallelism each
    # engine believes that it is alone and has rank 0; only its index differs.
    index = getattr(parallel, "data_parallel_index", getattr(parallel, "data_parallel_rank", 0))
    sizes = [getattr(parallel, name, None) or 1 for name in ("data_parallel_size", "elastic_ep_max_dp_size")]
    if "cache_dir" in values and max(index + 1, *sizes) > 1:
        values["cache_dir"] /= f"rank-{index}"
    return IntegrationSettings(**values)


class _SettingType(NamedTuple):
    name: str  # the description of valid values
    types: tuple[type, ...]
    make: Callable[[Any], Any]

    def read(self, name: str, value: Any) -> Any:
        try:
            if isinstance(value, self.types) and not isinstance(value, bool):
                return self.make(value)
        except (TypeError, ValueError):
            pass
        raise ConfigError(f"{name} must be {self.name}, got {value!r}")


def _path(value: str | Path) -> Path:
    return Path(value).expanduser()


def _paths(value: str | Sequence[Any]) -> tuple[Path, ...]:
    return tuple(map(_path, [part for part in value.split(os.pathsep) if part] if isinstance(value, str) else value))


_TEXT = _SettingType("a string", (str,), str)
_INTEGER = _SettingType("a whole number", (str, int), int)
_SETTING_TYPES: Mapping[str, _SettingType] = {
    "cache_dir": _SettingType("a path", (str, Path), _path),
    "redis_url": _TEXT,
    "namespace": _TEXT,
    "capacity_tokens": _INTEGER,
    "rebuild_interval_s": _SettingType("a number", (str, int, float), float),
    "warm_dirs": _SettingType("a list of paths", (str, Sequence), _paths),
    "max_match_length": _INTEGER,
    "tokenizer": _TEXT,
}
