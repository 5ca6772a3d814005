"""The files of the pages at / and /docs, read once, with the headers they are answered with."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

_PAGE = Path(__file__).parent / "static"
_DOCS = Path(__file__).parent / "docs"
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
    """Those of / by their path in the service; they lie below /page/, as its own links have it."""
    files = {f"/page/{path.name}": _read(path) for path in sorted(_PAGE.iterdir())}
    files["/"] = files.pop("/page/index.html")
    files["/favicon.ico"] = files["/page/icon.svg"]
    return files


def docs_files() -> dict[str, PageFile]:
    """Those of /docs by their path in the service; they lie below it."""
    files = {f"/docs/{path.name}": _read(path) for path in sorted(_DOCS.iterdir())}
    files["/docs"] = files.pop("/docs/docs.html")
    files["/docs/icon.svg"] = _read(_PAGE / "icon.svg")
    return files


def _read(path: Path) -> PageFile:
    content = path.read_bytes()
    return PageFile(content, _TYPES[path.suffix], f'"{hashlib.sha256(content).hexdigest()[:32]}"')
