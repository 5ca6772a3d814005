"""Where a model or a tokenizer that is no directory comes from."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class HubOptions:
    """How files are taken from the Hugging Face hub; a directory on this machine is read as it is."""

    revision: str | None = None
    """Branch, tag or commit; None: main."""
    cache_dir: Path | None = None
    """Where files are kept; None: the hub's own cache."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model, with all rights of this process."""

    def file_arguments(self) -> dict[str, Any]:
        """Keyword arguments for what fetches a file."""
        return {"revision": self.revision, "cache_dir": None if self.cache_dir is None else str(self.cache_dir)}

    def arguments(self) -> dict[str, Any]:
        """Keyword arguments of ``from_pretrained``."""
        return {**self.file_arguments(), "trust_remote_code": self.trust_remote_code}
