"""Atomic file writes, locks and manifests. Only their owner can read the files, because they contain users' text.

Only regular files are read, because a pipe in place of a file would block its reader.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import re
import secrets
import stat
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from io import BufferedReader
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import xxhash

from ssd.errors import CacheLocked, ConfigError, FormatVersion, NamespaceMismatch, SegmentCorrupt, TokenizerMismatch

_NAMESPACE = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.-]{0,63}")
_FINGERPRINT = re.compile(r"[0-9a-f]{32}")
_SEGMENT_ID = re.compile(r"[0-9a-z-]{1,64}")


def check_namespace(name: str) -> str:
    """Return a namespace's name; raise ConfigError unless it is 1-64 of A-Z a-z 0-9 _ . - without a leading dot."""
    if not _NAMESPACE.fullmatch(name):
        raise ConfigError(
            f"namespace {name[:80]!r} is invalid: use 1 to 64 characters of A-Z a-z 0-9 _ . - without a leading dot"
        )
    return name


def check_fingerprint(fingerprint: str) -> str:
    """Return a tokenizer's fingerprint; raise ConfigError unless it is 32 lower-case hexadecimal characters."""
    if not _FINGERPRINT.fullmatch(fingerprint):
        raise ConfigError(f"tokenizer fingerprint {fingerprint[:80]!r} must be 32 lower-case hexadecimal characters")
    return fingerprint


def is_segment_id(text: object) -> bool:
    """Return whether ``text`` could be a segment id (see ``new_segment_id``), so that it is safe as a file name."""
    return isinstance(text, str) and _SEGMENT_ID.fullmatch(text) is not None


_RETAINED = "-kept-"


def new_segment_id(start: int | None, *, retained: bool = False) -> str:
    """Return a new id for a segment; with ``retained``, the id marks text that is kept because outputs repeated it.

    The id is random, so a merge that still runs after its server was replaced cannot overwrite a file of the new
    server.
    """
    return f"{'static' if start is None else f'{start:012d}'}{_RETAINED if retained else '-'}{secrets.token_hex(8)}"


def is_retained(segment_id: str) -> bool:
    """Return whether a segment consists of text that was retained because outputs repeated it."""
    return _RETAINED in segment_id


FILE_MODE = 0o600
DIRECTORY_MODE = 0o700

_TEMPORARY = re.compile(r"(?:[0-9a-z-]{1,64}\.seg|manifest(?:-previous)?\.json|learned\.bin)\.\d{1,10}\.tmp")


def write_file(path: Path, parts: Sequence[bytes | memoryview], *, durable: bool) -> None:
    """Write ``parts`` to ``path`` atomically: readers see either the old file or the new one. Raises OSError.

    The bytes are written to a temporary file in the same directory, which is renamed to ``path``. With ``durable``,
    they are synced to disk before the renaming.
    """
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        with os.fdopen(_create(temporary), "wb") as file:
            for part in parts:
                file.write(part)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:  # also on KeyboardInterrupt and SystemExit
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise


def create_file(path: Path, parts: Sequence[bytes | memoryview]) -> None:
    """Create ``path`` with ``parts`` atomically and durably. An existing file is not changed. Raises OSError."""
    made = path.with_name(f"{path.name}.{secrets.token_hex(4)}.tmp")
    write_file(made, parts, durable=True)
    try:
        with contextlib.suppress(FileExistsError):  # another process created it first
            os.link(made, path)
    finally:
        made.unlink()
    sync_directory(path.parent)


def _create(path: Path) -> int:
    """Create a file without following links. A file left by an earlier process with the same process id is removed."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    try:
        return os.open(path, flags, FILE_MODE)
    except FileExistsError:
        path.unlink()
        return os.open(path, flags, FILE_MODE)


class NotAFileError(OSError):
    """Raised if a path is a directory, a pipe, a socket or a device instead of a file."""


def open_file(path: Path) -> BufferedReader:
    """Open a regular file, or a link to a regular file, for reading. Never blocks.

    Raises NotAFileError if ``path`` is something else, such as a pipe, and OSError if the file cannot be opened.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise NotAFileError(errno.EINVAL, "it is not a regular file", str(path))
    return os.fdopen(descriptor, "rb")


def open_lock(path: Path) -> BinaryIO:
    """Open a lock file, and create it if it is missing. Raises OSError.

    The file is neither read nor written, so that a pipe does not block.
    """
    return os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, FILE_MODE), "rb", 0)


def is_temporary(path: Path) -> bool:
    """Return whether ``path`` is a temporary file of an unfinished ``write_file``. Raises OSError."""
    return _TEMPORARY.fullmatch(path.name) is not None and is_regular(path)


def is_regular(path: Path) -> bool:
    """Return whether ``path`` is a regular file; False if it is a link or has just been removed. Raises OSError."""
    try:
        return stat.S_ISREG(path.lstat().st_mode)
    except FileNotFoundError:
        return False


def sync_directory(path: Path) -> None:
    """Sync a directory, so that renames and removals in it survive a power failure. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_directory(path: Path) -> None:
    """Create the directory ``path`` and its missing parents, accessible to their owner only. Raises OSError.

    Existing directories stay unchanged.
    """
    for missing in [*reversed(path.parents), path]:
        if not missing.is_dir():
            try:
                missing.mkdir(mode=DIRECTORY_MODE)
            except FileExistsError:  # another process created it, or it is not a directory
                if not missing.is_dir():
                    raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(missing)) from None


LOCK_NAME = "writer.lock"


class DirectoryLock:
    """A lock that gives one process the exclusive right to write a directory. It is released when the process ends.

    Both the directory and a file in it are locked. The lock of the directory cannot be lost by removing a file. The
    file is locked too because former versions lock only the file, and some network file systems cannot lock a
    directory.
    """

    def __init__(self, path: Path) -> None:
        """Lock a directory without waiting. Raises CacheLocked if another process has the lock, and OSError."""
        self._path = path
        self._file: BinaryIO | None = None
        self._directory: int | None = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            with contextlib.suppress(OSError):  # a file system that cannot lock directories
                self._lock(self._directory)
            self.renew()
        except BaseException:
            self.close()
            raise

    def renew(self) -> None:
        """Check that the locked directory is still at its path, and create the lock file again if it was removed.

        Raises CacheLocked if another process has the lock, and OSError.
        """
        assert self._directory is not None, "closed"
        if not os.path.samestat(os.fstat(self._directory), self._path.stat()):
            raise CacheLocked(f"{self._path} was replaced by another directory: restart the server")
        with contextlib.suppress(FileNotFoundError):
            lock = (self._path / LOCK_NAME).lstat()
            if self._file is not None and os.path.samestat(os.fstat(self._file.fileno()), lock):
                return
        file = open_lock(self._path / LOCK_NAME)
        try:
            self._lock(file)
        except BaseException:
            file.close()
            raise
        if self._file is not None:
            self._file.close()
        self._file = file

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
        if self._directory is not None:
            os.close(self._directory)
        self._file = self._directory = None

    def _lock(self, file: BinaryIO | int) -> None:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise CacheLocked(
                f"another process writes {self._path}. Stop that process, or use another directory for this "
                "process. (Several servers share text through Redis, not through a directory.)"
            ) from None


class Owner(NamedTuple):
    """The owner of a cache directory's text, as two HMACs that only the server with the secret can interpret.

    Attributes:
        secret: Identifies the secret; the same in all directories that use the secret.
        tenant: Identifies the tenant; the same in all directories of the tenant.
    """

    secret: str
    tenant: str


MANIFEST_NAME = "manifest.json"
PREVIOUS_NAME = "manifest-previous.json"
DAMAGED_NAME = "manifest-damaged.json"
MANIFEST_FORMAT = 1
MAX_FORMAT = 1000
"""The largest plausible file format number. A larger number means that the file is damaged."""
_MAX_MANIFEST_BYTES = 64 << 20
MAX_POSITION = 1 << 61
"""The largest valid ring-buffer position in a file. It leaves room for later text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """The list of the segments of a cache directory at one time.

    Attributes:
        fingerprint: The fingerprint of the tokenizer.
        generation: A number that grows with every commit.
        next_position: The first ring-buffer position at which nothing was ever stored.
        segments: ``id``, ``num_tokens`` and ``start`` (None for a prebuilt segment) of each segment. Only ``id`` is
            used; the other fields are for people and tools. Prebuilt segments come first, then ring segments, oldest
            first.
    """

    fingerprint: str
    namespace: str
    generation: int = 0
    next_position: int = 0
    segments: tuple[dict[str, Any], ...] = ()
    owner: Owner | None = None
    """The owner of the directory's text; None if the server has no secret."""
    shared: Mapping[str, Any] | None = field(default=None, compare=False)
    """The replication-log position up to which all text is in the listed segments, as JSON
    (``NamespaceCache.checkpoint``).
    """

    @property
    def segment_ids(self) -> tuple[str, ...]:
        return tuple(segment["id"] for segment in self.segments)


_ADVICE = (
    "A server rebuilds the manifest of its own directory from the segments; otherwise restore it from a copy, or "
    "delete the directory to start empty"
)


def read_manifest(
    path: Path, *, fingerprint: str | None = None, namespace: str | None = None, name: str = MANIFEST_NAME
) -> Manifest | None:
    """Read the manifest of a cache directory from the file ``name`` in it; return None if there is no such file.

    ``fingerprint`` and ``namespace`` are those that the manifest must have; None accepts any.

    Raises:
        SegmentCorrupt, FormatVersion, TokenizerMismatch, NamespaceMismatch: The manifest cannot be used.
        OSError: The manifest cannot be read.
    """
    manifest_path = path / name
    try:
        with open_file(manifest_path) as file:
            text = file.read(_MAX_MANIFEST_BYTES)
    except FileNotFoundError:
        return None
    except NotAFileError:
        raise SegmentCorrupt(f"{manifest_path} is not a regular file. {_ADVICE}") from None
    try:
        manifest = _from_json(parse_checked_json("manifest", text))
    except _NewerFormat as error:
        raise FormatVersion(
            f"{manifest_path} has format {error}, this version reads {MANIFEST_FORMAT}. Delete the directory and "
            "rebuild it, or use the version of ssd that wrote it"
        ) from None
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise SegmentCorrupt(f"{manifest_path} is damaged ({error}). {_ADVICE}") from None
    if fingerprint is not None and manifest.fingerprint != fingerprint:
        raise TokenizerMismatch(
            f"{path} was made with tokenizer {manifest.fingerprint:.40}, but the current tokenizer is "
            f"{fingerprint}, so the stored token ids would mean other text. Use another directory, or the "
            "tokenizer of the cache"
        )
    if namespace is not None and manifest.namespace != namespace:
        raise NamespaceMismatch(
            f"{path} is the cache of namespace {manifest.namespace[:80]!r}, not of {namespace!r}, and text of "
            "one namespace is not used in another. To use it here on purpose, move it elsewhere and pass it with "
            "`ssd-serve --warm`; otherwise use another directory for this cache"
        )
    return manifest


def _from_json(content: Any) -> Manifest:
    manifest = Manifest(
        fingerprint=content["fingerprint"],
        namespace=content["namespace"],
        generation=content["generation"],
        next_position=content["next_position"],
        segments=tuple(content["segments"]),
        owner=Owner(*map(str, content["owner"])) if content.get("owner") else None,
        shared=content.get("shared"),  # any JSON: ``Checkpoint.from_json`` validates it
    )
    if not all(map(is_segment_id, manifest.segment_ids)):
        raise ValueError("the manifest has an invalid segment id")
    if len(set(manifest.segment_ids)) < len(manifest.segments):
        raise ValueError("the manifest names a segment twice")
    if not (isinstance(manifest.fingerprint, str) and isinstance(manifest.namespace, str)):
        raise ValueError("the manifest has no fingerprint or no namespace")
    for number in (manifest.generation, manifest.next_position):
        if type(number) is not int or not 0 <= number <= MAX_POSITION:
            raise ValueError("the manifest has invalid numbers")
    return manifest


def write_manifest(path: Path, manifest: Manifest) -> None:
    """Replace the manifest of a cache directory atomically, and sync it to disk. Raises OSError."""
    content = {name: value for name, value in asdict(manifest).items() if value is not None}
    write_file(path / MANIFEST_NAME, [dump_checked_json("manifest", content)], durable=True)
    sync_directory(path)


class _NewerFormat(ValueError):
    """Raised if a file has a format number that this version does not know."""


def dump_checked_json(name: str, content: Mapping[str, Any]) -> bytes:
    """Serialize ``content`` as JSON under the key ``name``, with the format number and a checksum that covers both."""
    content = {**content, "format": MANIFEST_FORMAT}  # the checksum does not cover the outer format number
    return json.dumps({"format": MANIFEST_FORMAT, name: content, "xxh3": _digest(content)}, indent=1).encode()


def parse_checked_json(name: str, text: bytes) -> Any:
    """Parse the output of ``dump_checked_json`` of this or an older version.

    Raises ValueError, KeyError or TypeError if the text is damaged or a newer version wrote it.
    """
    outer = json.loads(text)
    content, version = outer[name], outer["format"]
    if is_whole := isinstance(content, dict) and outer["xxh3"] == _digest(content):
        version = content.get("format", version)
    if version != MANIFEST_FORMAT and type(version) is int and MANIFEST_FORMAT < version <= MAX_FORMAT:
        raise _NewerFormat(version)
    if not is_whole or version != MANIFEST_FORMAT:
        raise ValueError("the checksum does not match")
    return {key: value for key, value in content.items() if key != "format"}


def _digest(content: object) -> str:
    return xxhash.xxh3_64_hexdigest(json.dumps(content, sort_keys=True).encode())
