"""Published text at an fsspec URL: a directory, a bucket, whatever the installed file systems reach.

::

    <URL>/<fingerprint>/<namespace>/chunks/<name>       written once, whole or not at all
    <URL>/<fingerprint>/<namespace>/head, layer         where there is no Redis

Who can write there can change what is drafted, never what is said: all that is read is checked as if it came from
Redis. Without Redis there is no lease: the head that was written last counts, and whoever finds that it is another's
takes what it lacks before it writes again.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final, NamedTuple

from ssd.errors import ConfigError, first_line
from ssd.retrieval.files import make_directory, write_file
from ssd.sharing.published.chunk import owner_of
from ssd.sharing.published.head import MAX_HEAD_BYTES, TAG_BYTES
from ssd.sharing.published.store import MAX_BLOB_BYTES, Store, Tags

_MAX_NAMES: Final = 1 << 17


class Place(NamedTuple):
    """A file system and a path in it. ``is_local`` : files of this machine, which are written as our own are."""

    files: Any
    path: str
    is_local: bool


def open_place(url: str) -> Place:
    """Where ``url`` leads. Nothing is looked at yet. Raises ConfigError."""
    try:
        import fsspec
    except ModuleNotFoundError:
        raise ConfigError("publishing to a URL needs fsspec: pip install 'ssd-serving[store]'") from None
    try:
        files, path = fsspec.core.url_to_fs(url, use_listings_cache=False, skip_instance_cache=True)
    except Exception as error:  # an unknown protocol, a package that is not installed
        raise ConfigError(f"{url.split('?')[0]!r} cannot be published to: {first_line(error)}") from None
    protocols = files.protocol if isinstance(files.protocol, tuple) else (files.protocol,)
    return Place(files, path.rstrip("/"), "file" in protocols)


class UrlChunks:
    """Chunks as files."""

    def __init__(self, place: Place, fingerprint: str, namespace: str) -> None:
        self._place = place
        self._path = f"{place.path}/{fingerprint}/{namespace}/chunks"

    def get(self, name: bytes) -> bytes | None:
        """As ``Chunks`` has it."""
        return _read(self._place, f"{self._path}/{name.hex()}", MAX_BLOB_BYTES)

    def put(self, name: bytes, data: bytes) -> None:
        """As ``Chunks`` has it."""
        _write(self._place, f"{self._path}/{name.hex()}", data)

    def names(self) -> set[bytes]:
        """As ``Chunks`` has it."""
        self._place.files.invalidate_cache()
        try:
            paths = self._place.files.ls(self._path, detail=False)
        except FileNotFoundError:
            return set()
        names = (path.rpartition("/")[2] for path in paths[:_MAX_NAMES])
        return {bytes.fromhex(name) for name in names if len(name) == 32 and not set(name) - _DIGITS}

    def remove(self, names: Iterable[bytes]) -> None:
        """As ``Chunks`` has it."""
        for name in names:
            _remove(self._place, f"{self._path}/{name.hex()}")

    def clear(self) -> int:
        """As ``Chunks`` has it."""
        names = self.names()
        self.remove(names)
        _remove(self._place, self._path, is_directory=True)
        return len(names)


class UrlHeads:
    """Both heads as files, and no lease. One owner."""

    def __init__(self, place: Place, fingerprint: str, namespace: str) -> None:
        self._place = place
        self._directory = f"{place.path}/{fingerprint}/{namespace}"

    def tags(self) -> Tags:
        """As ``Heads`` has it."""
        return Tags(*((_read_from(self._place, path, TAG_BYTES) or b"") for path in self._paths()))

    def read(self, *, layer: bool = False) -> bytes | None:
        """As ``Heads`` has it."""
        return _read(self._place, self._paths()[layer], MAX_HEAD_BYTES)

    def hold(self) -> int | None:
        """As ``Heads`` has it: everybody may write."""
        return 0

    def release(self) -> None:
        """As ``Heads`` has it."""

    def replace(self, data: bytes) -> bool:
        """As ``Heads`` has it."""
        _write(self._place, self._paths()[0], data)
        return True

    def replace_layer(self, data: bytes) -> None:
        """As ``Heads`` has it."""
        _write(self._place, self._paths()[1], data)

    def clear(self) -> int:
        """As ``Heads`` has it."""
        count = sum(_remove(self._place, path) for path in self._paths())
        _remove(self._place, self._directory, is_directory=True)
        return count

    def _paths(self) -> tuple[str, str]:
        return f"{self._directory}/head", f"{self._directory}/layer"


def url_store(place: Place, fingerprint: str, namespace: str) -> Store:
    """All of a namespace at a URL."""
    heads, chunks = UrlHeads(place, fingerprint, namespace), UrlChunks(place, fingerprint, namespace)
    return Store(owner_of(fingerprint, namespace), heads, chunks)


_DIGITS: Final = frozenset("0123456789abcdef")


def _read(place: Place, path: str, most_bytes: int) -> bytes | None:
    """All of a file; None where there is none, or it has more than ``most_bytes``."""
    data = _read_from(place, path, most_bytes + 1)
    return None if data is None or len(data) > most_bytes else data


def _read_from(place: Place, path: str, num_bytes: int) -> bytes | None:
    try:
        with place.files.open(path, "rb", cache_type="none") as file:
            data: bytes = file.read(num_bytes)
            return data
    except FileNotFoundError:
        return None


def _write(place: Place, path: str, data: bytes) -> None:
    if place.is_local:
        make_directory(Path(path).parent)
        write_file(Path(path), [data], durable=True)
    else:
        place.files.pipe_file(path, data)


def _remove(place: Place, path: str, *, is_directory: bool = False) -> bool:
    try:
        place.files.rmdir(path) if is_directory else place.files.rm_file(path)
    except OSError:
        if is_directory or not place.files.exists(path):
            return False
        raise
    return True
