"""Which cache belongs to whom, by a name that tells neither the tenant nor its salt to who has not the secret."""

from __future__ import annotations

import hashlib
import hmac
import json
from dataclasses import dataclass
from typing import Final

_DIGITS: Final = 40


@dataclass(frozen=True, slots=True)
class NamespaceNames:
    """Names by HMAC with the server's ``secret``. Servers with one secret find the same names."""

    secret: bytes

    def tenant(self, base: str, seed: str, generation: int) -> str:
        """The namespace of a tenant: of what is served under ``base``, after it was deleted ``generation`` times."""
        return "t" + self._digest("tenant", base, seed, generation)

    def salted(self, namespace: str, salt: str) -> str:
        """The namespace of one ``cache_salt`` inside another namespace."""
        return "s" + self._digest("salt", namespace, salt)

    def counter(self, base: str, seed: str) -> str:
        """What a tenant's number of deletions is kept under, of what is served under ``base``."""
        return self._digest("counter", base, seed)

    def short(self, digest: str) -> str:
        """A name for a key that has no other: 8 digits that nobody can try keys against."""
        return self._digest("name", digest)[:8]

    def _digest(self, *parts: str | int) -> str:
        text = json.dumps(parts).encode()  # so that no two lists of parts are one text
        return hmac.new(self.secret, text, hashlib.sha256).hexdigest()[:_DIGITS]
