"""The files of the page, read once, with the headers they are answered with."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

_FILES = Path(__file__).parent / "static"
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
_POLICY = "; ".join(
    [
        "default-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "object-src 'none'",
        "require-trusted-types-for 'script'",
    ]
)
"""Scripts, styles and requests of this origin alone, none of them inline; text never becomes markup."""

SECURITY_HEADERS: Mapping[str, str] = {
    "content-security-policy": _POLICY,
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "permissions-policy": "camera=(), geolocation=(), microphone=()",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
}


@dataclass(frozen=True, slots=True)
class PageFile:
    """A file as it is answered; ``etag`` : changes when the content does."""

    content: bytes
    media_type: str
    etag: str

    @property
    def headers(self) -> dict[str, str]:
        """A browser keeps the file, and asks each time whether it is still the same."""
        return {**SECURITY_HEADERS, "etag": self.etag, "cache-control": "no-cache"}


def page_files() -> dict[str, PageFile]:
    """All files by their path in the service; those of the page lie below /page/, as its own links have it."""
    files = {}
    for path in sorted(_FILES.iterdir()):
        content = path.read_bytes()
        etag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'
        files[f"/page/{path.name}"] = PageFile(content, _TYPES[path.suffix], etag)
    files["/"] = files.pop("/page/index.html")
    files["/favicon.ico"] = files["/page/icon.svg"]
    return files
