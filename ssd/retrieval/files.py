"""Files that are there whole or not at all, and that only their owner reads: what is stored is what people said.

Nothing else is read either: a pipe in the place of a file would keep its reader waiting for a writer.
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
    """``name`` itself, or ConfigError: 1-64 characters of A-Z a-z 0-9 _ . - that do not begin with a dot."""
    if not _NAMESPACE.fullmatch(name):
        raise ConfigError(
            f"namespace {name[:80]!r} cannot be used: take 1 to 64 characters of A-Z a-z 0-9 _ . - and no leading dot"
        )
    return name


def check_fingerprint(fingerprint: str) -> str:
    """``fingerprint`` itself, or ConfigError: 32 lower-case hexadecimal characters."""
    if not _FINGERPRINT.fullmatch(fingerprint):
        raise ConfigError(f"tokenizer fingerprint {fingerprint[:80]!r} must be 32 lower-case hexadecimal characters")
    return fingerprint


def is_segment_id(text: object) -> bool:
    """True for what ``new_segment_id`` makes; anything else must not become a file name."""
    return isinstance(text, str) and _SEGMENT_ID.fullmatch(text) is not None


_KEPT = "-kept-"


def new_segment_id(start: int | None, *, kept: bool = False) -> str:
    """A name no other segment has: random, so that a rebuild which outlived its server cannot overwrite a file.

    ``kept`` : says that it is text that outlives its age, see ``is_kept``.
    """
    return f"{'static' if start is None else f'{start:012d}'}{_KEPT if kept else '-'}{secrets.token_hex(8)}"


def is_kept(segment_id: str) -> bool:
    """Whether a segment holds what was of use of text that was evicted."""
    return _KEPT in segment_id


FILE_MODE = 0o600
DIRECTORY_MODE = 0o700

_TEMPORARY = re.compile(r"(?:[0-9a-z-]{1,64}\.seg|manifest(?:-previous)?\.json|learned\.bin)\.\d{1,10}\.tmp")


def write_file(path: Path, parts: Sequence[bytes | memoryview], *, durable: bool) -> None:
    """Put ``parts`` at ``path`` atomically: readers see the old file or the new one. Raises OSError.

    The bytes go to a temporary name in the same directory, which is renamed; ``durable`` : once they are on disk.
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
    except BaseException:  # a process that is told to end leaves nothing behind either
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise


def make_file(path: Path, parts: Sequence[bytes | memoryview]) -> None:
    """Put ``parts`` at ``path`` atomically and on disk, unless something is there: then that stays. Raises OSError."""
    made = path.with_name(f"{path.name}.{secrets.token_hex(4)}.tmp")
    write_file(made, parts, durable=True)
    try:
        with contextlib.suppress(FileExistsError):  # another process was first
            os.link(made, path)
    finally:
        made.unlink()
    sync_directory(path.parent)


def _create(path: Path) -> int:
    """A new file that no link leads elsewhere; what an earlier process of our number left there goes."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    try:
        return os.open(path, flags, FILE_MODE)
    except FileExistsError:
        path.unlink()
        return os.open(path, flags, FILE_MODE)


class NotAFileError(OSError):
    """A path leads to a directory, a pipe, a socket or a device."""


def open_file(path: Path) -> BufferedReader:
    """A regular file, or one that a link leads to, to be read. Never waits. Raises NotAFileError and OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise NotAFileError(errno.EINVAL, "it is no regular file", str(path))
    return os.fdopen(descriptor, "rb")


def open_lock(path: Path) -> BinaryIO:
    """A file to be locked, made where it lacks; nothing is read or written, so a pipe is waited for by nobody.

    Raises OSError.
    """
    return os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, FILE_MODE), "rb", 0)


def is_temporary(path: Path) -> bool:
    """Whether ``path`` is a file with a name that ``write_file`` gives while it writes. Raises OSError."""
    return _TEMPORARY.fullmatch(path.name) is not None and is_regular(path)


def is_regular(path: Path) -> bool:
    """Whether ``path`` itself is a file, no link to one; not one that another process just removed. Raises OSError."""
    try:
        return stat.S_ISREG(path.lstat().st_mode)
    except FileNotFoundError:
        return False


def sync_directory(path: Path) -> None:
    """Make renames and removals in ``path`` survive a power failure. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_directory(path: Path) -> None:
    """Make ``path`` and what is missing above it, for its owner alone; what is there stays as it is. Raises OSError."""
    for missing in [*reversed(path.parents), path]:
        if not missing.is_dir():
            try:
                missing.mkdir(mode=DIRECTORY_MODE)
            except FileExistsError:  # another process was faster, or it is something else
                if not missing.is_dir():
                    raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(missing)) from None


LOCK_NAME = "writer.lock"


class DirectoryLock:
    """The right to write a directory, held by one process; the kernel takes it back however that ends.

    Locked are the directory itself, whose lock no removed file takes away, and a file in it: former versions lock that
    alone, and some network file systems lock no directory.
    """

    def __init__(self, path: Path) -> None:
        """Raises CacheLocked at once when another holds it, and OSError."""
        self._path = path
        self._file: BinaryIO | None = None
        self._directory: int | None = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            with contextlib.suppress(OSError):  # of a file system that locks none
                self._lock(self._directory)
            self.renew()
        except BaseException:
            self.close()
            raise

    def renew(self) -> None:
        """See that it is a lock of what is at the path now; make the file anew where somebody removed it.

        Raises CacheLocked where another process has the right, and OSError.
        """
        assert self._directory is not None, "closed"
        if not os.path.samestat(os.fstat(self._directory), self._path.stat()):
            raise CacheLocked(f"{self._path} is not the directory that was opened, another was put there: start again")
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
        """Give it back; may be called twice."""
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
                f"{self._path} is being written by another process. Stop that one, or give this one a directory of its "
                "own (several servers share what they learn through Redis, not through a directory)"
            ) from None


class Owner(NamedTuple):
    """Whose text a directory holds, in HMACs that only the secret of its server explains.

    ``secret`` : the same in all directories of one secret. ``tenant`` : in all of one tenant.
    """

    secret: str
    tenant: str


MANIFEST_NAME = "manifest.json"
PREVIOUS_NAME = "manifest-previous.json"
DAMAGED_NAME = "manifest-damaged.json"
MANIFEST_FORMAT = 1
MAX_FORMAT = 1000
"""No version has one beyond: such a number is damage."""
_MAX_MANIFEST_BYTES = 64 << 20
MAX_POSITION = 1 << 61
"""Far more than a ring will ever see; what is stored later still has room for its positions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """Which segments make up one generation of a directory.

    ``next_position`` : the first ring position nothing was ever stored at.
    ``segments`` : id, num_tokens and start (None when static) of each; all but the id is for people and tools. Static
        ones first, then those of the ring, oldest first.
    """

    fingerprint: str
    namespace: str
    generation: int = 0
    next_position: int = 0
    segments: tuple[dict[str, Any], ...] = ()
    owner: Owner | None = None
    """Whose it is; None where no secret names it."""
    shared: Mapping[str, Any] | None = field(default=None, compare=False)
    """JSON that ``SuffixCache`` keeps here about where the text came from; true of exactly these segments."""

    @property
    def segment_ids(self) -> tuple[str, ...]:
        """Ids of ``segments``."""
        return tuple(segment["id"] for segment in self.segments)


_ADVICE = (
    "A server makes that of its own directory anew from the segments; else restore it from a copy, or delete the "
    "directory to start empty"
)


def read_manifest(
    path: Path, *, fingerprint: str | None = None, namespace: str | None = None, name: str = MANIFEST_NAME
) -> Manifest | None:
    """The manifest of directory ``path``, None when there is none.

    ``fingerprint``, ``namespace`` : whose it must be, None for anyone's. ``name`` : of its file. Raises SegmentCorrupt,
    FormatVersion, TokenizerMismatch, NamespaceMismatch, and OSError when it cannot be read.
    """
    manifest_path = path / name
    try:
        with open_file(manifest_path) as file:
            text = file.read(_MAX_MANIFEST_BYTES)
    except FileNotFoundError:
        return None
    except NotAFileError:
        raise SegmentCorrupt(f"{manifest_path} is no regular file. {_ADVICE}") from None
    try:
        manifest = _from_json(from_checked_json("manifest", text))
    except _NewerFormat as error:
        raise FormatVersion(
            f"{manifest_path} has format {error}, this version reads {MANIFEST_FORMAT}. Delete the directory and build "
            "it again, or use the version of ssd that wrote it"
        ) from None
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise SegmentCorrupt(f"{manifest_path} is damaged ({error}). {_ADVICE}") from None
    if fingerprint is not None and manifest.fingerprint != fingerprint:
        raise TokenizerMismatch(
            f"{path} was made with tokenizer {manifest.fingerprint:.40}, this one is {fingerprint}: its token ids "
            "mean other text. Use another directory, or the tokenizer it was made with"
        )
    if namespace is not None and manifest.namespace != namespace:
        raise NamespaceMismatch(
            f"{path} is the cache of namespace {manifest.namespace[:80]!r}, not of {namespace!r}, and what is learned "
            f"in one is not used in another. To use it here on purpose, move it elsewhere and give it to "
            "`ssd-serve --warm`; else give this cache a directory of its own"
        )
    return manifest


def _from_json(content: Any) -> Manifest:
    """Raises ValueError, KeyError, TypeError for what ``write_manifest`` does not write."""
    manifest = Manifest(
        fingerprint=content["fingerprint"],
        namespace=content["namespace"],
        generation=content["generation"],
        next_position=content["next_position"],
        segments=tuple(content["segments"]),
        owner=Owner(*map(str, content["owner"])) if content.get("owner") else None,
        shared=content.get("shared"),  # whatever it is: ``Checkpoint`` looks
    )
    if not all(map(is_segment_id, manifest.segment_ids)):
        raise ValueError("it names a segment that no file can have")
    if len(set(manifest.segment_ids)) < len(manifest.segments):
        raise ValueError("it names a segment twice")
    if not (isinstance(manifest.fingerprint, str) and isinstance(manifest.namespace, str)):
        raise ValueError("it does not say whose it is")
    for number in (manifest.generation, manifest.next_position):
        if type(number) is not int or not 0 <= number <= MAX_POSITION:
            raise ValueError("it has numbers that no writer writes")
    return manifest


def write_manifest(path: Path, manifest: Manifest) -> None:
    """Put it into directory ``path``, in the place of the one that is there, and on disk. Raises OSError."""
    content = {name: value for name, value in asdict(manifest).items() if value is not None}
    write_file(path / MANIFEST_NAME, [as_checked_json("manifest", content)], durable=True)
    sync_directory(path)


class _NewerFormat(ValueError):
    """The number of a format that this version does not know."""


def as_checked_json(name: str, content: Mapping[str, Any]) -> bytes:
    """A file of ``content`` under ``name``, with the format, twice, and a checksum."""
    content = {**content, "format": MANIFEST_FORMAT}  # a digit of the outer one has no checksum
    return json.dumps({"format": MANIFEST_FORMAT, name: content, "xxh3": _digest(content)}, indent=1).encode()


def from_checked_json(name: str, text: bytes) -> Any:
    """The content that ``as_checked_json`` was given, or former versions. Raises ValueError, KeyError, TypeError."""
    outer = json.loads(text)
    content, version = outer[name], outer["format"]
    if is_whole := isinstance(content, dict) and outer["xxh3"] == _digest(content):
        version = content.get("format", version)
    if version != MANIFEST_FORMAT and type(version) is int and MANIFEST_FORMAT < version <= MAX_FORMAT:
        raise _NewerFormat(version)
    if not is_whole or version != MANIFEST_FORMAT:
        raise ValueError("its checksum does not match")
    return {key: value for key, value in content.items() if key != "format"}


def _digest(content: object) -> str:
    return xxhash.xxh3_64_hexdigest(json.dumps(content, sort_keys=True).encode())
