"""Names that become file names or parts of files."""

from __future__ import annotations

import re
import secrets

from ssd.errors import ConfigError

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
