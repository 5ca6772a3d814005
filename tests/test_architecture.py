"""The house: imports go downwards only, and what is torch-free stays so."""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import ssd

ROOT = Path(ssd.__file__).parent.parent

# Lowest first. A package may import from those before it and from itself.
LAYERS = [
    "ssd.errors",
    "ssd.numbers",
    "ssd.token_rules",
    "ssd.config",
    "ssd.text",
    "ssd.jit",
    "ssd.retrieval",
    "ssd.replication",
    "ssd.cost_model",
    "ssd.drafting",
    "ssd.model",
    "ssd.bundled",
    "ssd.engine",
    "ssd.integrations.trl",
    "ssd.integrations",
]
APPLICATIONS = ["cache_builder", "server", "benchmarks"]
MAY_USE = {
    "ssd.cost_model": {"ssd.errors", "ssd.config", "ssd.jit"},
    "ssd.bundled": set(),
    "ssd.integrations.trl": set(LAYERS[: LAYERS.index("ssd.integrations.trl")]),
    "ssd.integrations": set(LAYERS[: LAYERS.index("ssd.engine")]),
    "cache_builder": set(LAYERS[: LAYERS.index("ssd.model")]) - {"ssd.token_rules"} | {"ssd.bundled"},
    "benchmarks": {*LAYERS, "cache_builder", "server"},
}


def room_of(module: str) -> str | None:
    """The layer or application a module belongs to."""
    return next((room for room in LAYERS + APPLICATIONS if module == room or module.startswith(room + ".")), None)


def imports_of(path: Path, *, at_run_time: bool = False) -> set[str]:
    """Absolute names of everything a file imports; ``at_run_time`` leaves out what only type checkers see."""
    tree = ast.parse(path.read_text())
    unseen = {
        inner
        for node in ast.walk(tree)
        if at_run_time and isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")
        for statement in node.body
        for inner in ast.walk(statement)
    }
    found = set()
    for node in ast.walk(tree):
        if node in unseen:
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def module_of(path: Path) -> str:
    """The name a file is imported by."""
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def source_files() -> list[Path]:
    """Every module of the project."""
    return [path for top in ("ssd", *APPLICATIONS) for path in sorted((ROOT / top).rglob("*.py"))]


@pytest.mark.parametrize("path", source_files(), ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_go_downwards(path: Path) -> None:
    module = module_of(path)
    room = room_of(module)
    if room is None:
        assert module == "ssd", f"{module} belongs to no room"
        return
    allowed = MAY_USE.get(room, set(LAYERS[: LAYERS.index(room)]) if room in LAYERS else set(LAYERS))
    for name in imports_of(path):
        other = room_of(name)
        if other is not None and other != room:
            assert other in allowed, f"{module} imports {name}"


@cache
def module_imports() -> dict[str, set[str]]:
    """Of every module the modules that it imports, at any time, but not those only type checkers see."""
    modules = {module_of(path): path for path in source_files()}

    def imported(path: Path) -> Iterator[str]:
        for name in imports_of(path, at_run_time=True):
            yield from [part for part in (name, name.rpartition(".")[0]) if part in modules][:1]

    return {module: set(imported(path)) - {module} for module, path in modules.items()}


def a_circle(graph: dict[str, set[str]]) -> list[str]:
    """Nodes that lead from one to the next and back to the first; empty where there are none."""
    done: set[str] = set()

    def search(node: str, path: list[str]) -> list[str]:
        if node in path:
            return [*path[path.index(node) :], node]
        if node not in done:
            for other in sorted(graph[node]):
                if circle := search(other, [*path, node]):
                    return circle
            done.add(node)
        return []

    return next((circle for node in sorted(graph) if (circle := search(node, []))), [])


def test_circles_are_found() -> None:
    assert a_circle({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == []
    assert a_circle({"a": {"b"}, "b": {"c"}, "c": {"d"}, "d": {"b"}}) == ["b", "c", "d", "b"]
    assert a_circle({"a": {"a"}}) == ["a", "a"]


def test_no_module_imports_itself_through_others() -> None:
    assert a_circle(module_imports()) == []


@pytest.mark.parametrize("room", [room for room in LAYERS + APPLICATIONS if (ROOT / room.replace(".", "/")).is_dir()])
def test_folders_of_a_room_import_each_other_in_one_direction(room: str) -> None:
    """The room's own folder is one of them, but for its door, ``__init__``, which may open onto all."""
    folders: dict[str, set[str]] = {}
    doors = {module_of(path) for path in source_files() if path.name == "__init__.py"}

    def folder(module: str) -> str:
        return module if module in doors else module.rpartition(".")[0]

    for module, imported in module_imports().items():
        if room_of(module) == room and module != room:
            inside = {folder(other) for other in imported if room_of(other) == room and other != room}
            folders.setdefault(folder(module), set()).update(inside - {folder(module)})
    assert a_circle(folders) == []


@pytest.mark.parametrize(
    "module",
    ["ssd", "cache_builder", "ssd.retrieval.cache_manager", "ssd.drafting", "ssd.replication", "ssd.integrations.vllm"],
)
def test_importing_loads_neither_torch_nor_the_web_framework(module: str) -> None:
    code = f"import sys, {module}; print(sorted({{'torch', 'fastapi'}} & set(sys.modules)))"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert loaded.stdout.strip() == "[]"


def test_importing_the_class_loads_nothing_heavy_but_torch_and_numba() -> None:
    """The whole of transformers, and what it loads of torch, takes longer to import than everything else together."""
    heavy = {
        "transformers",
        "tokenizers",
        "huggingface_hub",
        "accelerate",
        "sympy",
        "scipy",
        "torch._dynamo",
        "torch._inductor",
        "torch.distributed.tensor",
        "torch.fx.experimental.symbolic_shapes",
        "triton",
        "redis",
        "fastapi",
        "pydantic",
        "uvicorn",
        "llguidance",
        "pyarrow",
    }
    code = f"import sys; from ssd import LLM; print(sorted({heavy} & set(sys.modules)))"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert loaded.stdout.strip() == "[]"


def test_public_names_are_what_is_promised() -> None:
    assert ssd.__all__ == sorted(ssd.__all__, key=lambda name: (not name.isupper(), name))
    for name in ssd.__all__:
        assert getattr(ssd, name)


def test_version_is_that_of_the_project() -> None:
    project = Path(__file__).parent.parent / "pyproject.toml"
    assert tomllib.loads(project.read_text())["project"]["version"] == ssd.__version__


def test_asking_for_the_version_imports_nothing_heavy() -> None:
    heavy = {"torch", "transformers", "numba", "fastapi"}
    code = f"import sys, ssd; ssd.__version__; print(sorted({heavy} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
