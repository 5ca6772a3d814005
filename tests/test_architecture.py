"""The house: imports go downwards only, and what is torch-free stays so."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import ssd

ROOT = Path(ssd.__file__).parent.parent

# Lowest first. A package may import from those before it and from itself.
LAYERS = [
    "ssd.errors",
    "ssd.token_rules",
    "ssd.config",
    "ssd.text",
    "ssd.compiled",
    "ssd.retrieval",
    "ssd.sharing",
    "ssd.pricing",
    "ssd.drafting",
    "ssd.model",
    "ssd.engine",
    "ssd.bundled",
    "ssd.integrations",
]
APPLICATIONS = ["cache_builder", "server", "benchmarks"]
MAY_USE = {
    "ssd.pricing": {"ssd.errors", "ssd.config", "ssd.compiled"},
    "cache_builder": {
        "ssd.errors",
        "ssd.config",
        "ssd.text",
        "ssd.compiled",
        "ssd.retrieval",
        "ssd.sharing",
        "ssd.pricing",
        "ssd.drafting",
    },
    "ssd.bundled": {"ssd.errors", "ssd.config", "ssd.text"},
    "ssd.integrations": {
        "ssd.errors",
        "ssd.token_rules",
        "ssd.config",
        "ssd.text",
        "ssd.compiled",
        "ssd.retrieval",
        "ssd.sharing",
        "ssd.pricing",
        "ssd.drafting",
        "ssd.model",
    },
}


def room_of(module: str) -> str | None:
    """The layer or application a module belongs to."""
    return next((room for room in LAYERS + APPLICATIONS if module == room or module.startswith(room + ".")), None)


def imports_of(path: Path) -> set[str]:
    """Absolute names of everything a file imports."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def source_files() -> list[Path]:
    """Every module of the project."""
    return [path for top in ("ssd", *APPLICATIONS) for path in sorted((ROOT / top).rglob("*.py"))]


@pytest.mark.parametrize("path", source_files(), ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_go_downwards(path: Path) -> None:
    module = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    room = room_of(module)
    if room is None:
        assert module == "ssd", f"{module} belongs to no room"
        return
    allowed = MAY_USE.get(room, set(LAYERS[: LAYERS.index(room)]) if room in LAYERS else set(LAYERS))
    for name in imports_of(path):
        other = room_of(name)
        if other is not None and other != room:
            assert other in allowed, f"{module} imports {name}"


@pytest.mark.parametrize(
    "module", ["ssd", "cache_builder", "ssd.retrieval.cache", "ssd.drafting", "ssd.sharing", "ssd.integrations.vllm"]
)
def test_importing_loads_neither_torch_nor_the_web_framework(module: str) -> None:
    code = f"import sys, {module}; print(sorted({{'torch', 'fastapi'}} & set(sys.modules)))"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert loaded.stdout.strip() == "[]"


def test_public_names_are_what_is_promised() -> None:
    assert ssd.__all__ == sorted(ssd.__all__)
    for name in ssd.__all__:
        assert getattr(ssd, name)
