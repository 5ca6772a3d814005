"""Settings of the drafter inside another engine: from the environment, and from that engine's own configuration."""

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
    """Each field is read from ``SSD_<NAME>``, then from the engine's configuration, which wins."""

    cache_dir: Path | None = None
    """Keep the cache here; None keeps nothing beyond the process."""

    redis_url: str | None = None
    """Learn from every server with the same URL, tokenizer and namespace, and they from this one."""

    namespace: str = DEFAULT_NAMESPACE
    """What the cache of this server is called."""

    capacity_tokens: int = IndexConfig().capacity_tokens
    """Most tokens kept."""

    rebuild_interval_s: float = IndexConfig().rebuild_interval_s
    """A non-empty tail is sealed at the latest this many seconds after the last seal."""

    warm_dirs: tuple[Path, ...] = ()
    """Directories made by ``ssd-cache build``; in the environment separated as ``PATH`` is."""

    max_match_length: int = 32
    """Longest tail of the context that is looked up, in tokens."""

    tokenizer: str | None = None
    """Whose token ids the cache holds: a directory, a ``tokenizer.json`` or a model id; None is the model's own."""

    def __post_init__(self) -> None:
        check_namespace(self.namespace)

    @property
    def is_shared(self) -> bool:
        """Whether anything outside this process is read or written, so that ids must mean the same there."""
        return self.cache_dir is not None or self.redis_url is not None or bool(self.warm_dirs)

    def cache_config(self) -> CacheConfig:
        """The cache's part. Raises ConfigError for values it cannot use."""
        index = IndexConfig(capacity_tokens=self.capacity_tokens, rebuild_interval_s=self.rebuild_interval_s)
        return CacheConfig(index=index, directory=self.cache_dir, redis_url=self.redis_url)


def read_settings(vllm_config: Any) -> IntegrationSettings:
    """The environment's, but for those of the engine's ``additional_config``. Raises ConfigError for an unknown key or
    a bad value."""
    additional = getattr(vllm_config, "additional_config", None)
    given = additional.get("ssd") if isinstance(additional, dict) else None
    given = {} if given is None else given
    if not isinstance(given, dict):
        raise ConfigError(f'additional_config["ssd"] must be an object of settings, got {given!r}')
    if unknown := sorted(map(str, given.keys() - _KINDS.keys())):
        raise ConfigError(f"unknown setting {', '.join(unknown)}; settings are {', '.join(sorted(_KINDS))}")
    values: dict[str, Any] = {}
    for name, kind in sorted(_KINDS.items()):
        variable = ENVIRONMENT_PREFIX + name.upper()
        if given.get(name) is not None:
            values[name] = kind.read(name, given[name])
        elif value := os.environ.get(variable):
            values[name] = kind.read(variable, value)
    parallel = getattr(vllm_config, "parallel_config", None)
    # A directory has one writer. Engines of a group that share no weights each think that they are alone, of rank 0.
    index = getattr(parallel, "data_parallel_index", getattr(parallel, "data_parallel_rank", 0))
    sizes = [getattr(parallel, name, None) or 1 for name in ("data_parallel_size", "elastic_ep_max_dp_size")]
    if "cache_dir" in values and max(index + 1, *sizes) > 1:
        values["cache_dir"] /= f"rank-{index}"
    return IntegrationSettings(**values)


class _Kind(NamedTuple):
    """What a value may be, what that is called, and what it is made to."""

    name: str
    types: tuple[type, ...]
    make: Callable[[Any], Any]

    def read(self, name: str, value: Any) -> Any:
        """Raises ConfigError."""
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


_TEXT = _Kind("a string", (str,), str)
_INTEGER = _Kind("a whole number", (str, int), int)
_KINDS: Mapping[str, _Kind] = {
    "cache_dir": _Kind("a path", (str, Path), _path),
    "redis_url": _TEXT,
    "namespace": _TEXT,
    "capacity_tokens": _INTEGER,
    "rebuild_interval_s": _Kind("a number", (str, int, float), float),
    "warm_dirs": _Kind("a list of paths", (str, Sequence), _paths),
    "max_match_length": _INTEGER,
    "tokenizer": _TEXT,
}
