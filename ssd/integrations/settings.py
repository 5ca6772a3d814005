"""Settings of the drafter inside another engine: from the environment, and from that engine's own configuration."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from ssd.config import CacheConfig, IndexConfig
from ssd.errors import ConfigError
from ssd.retrieval.cache import DEFAULT_NAMESPACE
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

    def below(self, name: str) -> IntegrationSettings:
        """The same with the directory ``name`` in ``cache_dir``: a directory has one writer."""
        return self if self.cache_dir is None else replace(self, cache_dir=self.cache_dir / name)

    def cache_config(self) -> CacheConfig:
        """The cache's part. Raises ConfigError for values it cannot use."""
        index = IndexConfig(capacity_tokens=self.capacity_tokens, rebuild_interval_s=self.rebuild_interval_s)
        return CacheConfig(index=index, directory=self.cache_dir, redis_url=self.redis_url)


def read_settings(overrides: Mapping[str, Any] | None = None) -> IntegrationSettings:
    """The environment's, but for ``overrides`` by field name. Raises ConfigError for an unknown key or a bad value."""
    known = {field.name for field in fields(IntegrationSettings)}
    given = dict(overrides or {})
    if unknown := sorted(map(str, given.keys() - known)):
        raise ConfigError(f"unknown setting {', '.join(unknown)}; settings are {', '.join(sorted(known))}")
    values: dict[str, Any] = {}
    for name in sorted(known):
        variable = ENVIRONMENT_PREFIX + name.upper()
        if given.get(name) is not None:
            values[name] = _READERS[name](name, given[name])
        elif value := os.environ.get(variable):
            values[name] = _READERS[name](variable, value)
    return IntegrationSettings(**values)


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise ConfigError(f"{name} must be a string, got {value!r}")
    return value


def _path(name: str, value: Any) -> Path:
    if not isinstance(value, str | Path):
        raise ConfigError(f"{name} must be a path, got {value!r}")
    return Path(value).expanduser()


def _paths(name: str, value: Any) -> tuple[Path, ...]:
    if isinstance(value, str):
        value = [part for part in value.split(os.pathsep) if part]
    if not isinstance(value, Sequence):
        raise ConfigError(f"{name} must be a list of paths, got {value!r}")
    return tuple(_path(name, part) for part in value)


def _integer(name: str, value: Any) -> int:
    try:
        if isinstance(value, str | int) and not isinstance(value, bool):
            return int(value)
    except ValueError:
        pass
    raise ConfigError(f"{name} must be a whole number, got {value!r}")


def _number(name: str, value: Any) -> float:
    try:
        if isinstance(value, str | int | float) and not isinstance(value, bool):
            return float(value)
    except ValueError:
        pass
    raise ConfigError(f"{name} must be a number, got {value!r}")


_READERS: Mapping[str, Callable[[str, Any], Any]] = {
    "cache_dir": _path,
    "redis_url": _text,
    "namespace": _text,
    "capacity_tokens": _integer,
    "rebuild_interval_s": _number,
    "warm_dirs": _paths,
    "max_match_length": _integer,
    "tokenizer": _text,
}
