"""Hooks of `mkdocs`: the pages at the root of the repository become pages of the site too."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).parent.parent
ROOT_PAGES = ("ARCHITECTURE.md", "SECURITY.md", "CONTRIBUTING.md", "CHANGELOG.md")


def on_files(files: Any, config: Any) -> Any:
    """Add the root's pages to the site."""
    for name in ROOT_PAGES:
        files.append(File.generated(config, name, content=(ROOT / name).read_text()))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Change links between files of the repository to links within the site; other files are only named."""
    place = page.file.src_uri
    here = ROOT if place in ROOT_PAGES else ROOT / "docs" / Path(place).parent

    def link(match: re.Match[str]) -> str:
        text, target = match[1], match[2]
        if re.match(r"[a-z]+:|#", target):
            return match[0]
        name, _, anchor = target.partition("#")
        path = (here / name).resolve()
        within = path.relative_to(ROOT).as_posix() if path.is_relative_to(ROOT) else ""
        source = within if within in ROOT_PAGES else within.removeprefix("docs/") if within[:5] == "docs/" else None
        if source is None:
            return text
        relative = os.path.relpath(source, Path(place).parent)
        return f"[{text}]({relative}{'#' + anchor if anchor else ''})"

    return re.sub(r"(?<!!)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)", link, markdown)
