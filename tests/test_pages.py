"""What the pages say: links lead somewhere, and spliced tables are what the results and the code say."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.child import ROOT
from benchmarks.report.__main__ import pages

ROOMS = ("ssd", "server", "cache_builder", "benchmarks", "tests", "examples")
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").glob("*.md")])


def prose(path: Path) -> str:
    return re.sub(r"```.*?```", "", path.read_text(), flags=re.DOTALL)


def anchors(path: Path) -> set[str]:
    """As hosting sites make them of headings."""
    headings = re.findall(r"^#+ (.+)$", prose(path), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def links(path: Path) -> Iterator[str]:
    for link in re.findall(r"\]\(([^)\s]+)\)", prose(path)):
        if not re.match(r"[a-z]+:", link):
            yield link


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(path: Path) -> None:
    for link in links(path):
        name, _, anchor = link.partition("#")
        target = (path.parent / name).resolve() if name else path
        assert target.exists(), link
        assert target.is_relative_to(ROOT), link
        if anchor:
            assert anchor in anchors(target), link


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_files_and_commands_that_a_page_names_are_there(path: Path) -> None:
    if path.name == "CHANGELOG.md":  # says what was
        return
    there = [file.relative_to(ROOT).as_posix() for room in ROOMS for file in (ROOT / room).rglob("*.py")]
    for name in re.findall(r"`([\w./]+\.py)`", prose(path)):
        assert any(f"/{file}".endswith(f"/{name}") for file in there), name
    for name in re.findall(rf"`((?:{'|'.join(ROOMS)})/[\w/]*)`", prose(path)):
        assert (ROOT / name).exists(), name
    for name in re.findall(r"python -m ((?:benchmarks|examples)[\w.]*)", path.read_text()):
        module = ROOT / name.replace(".", "/")
        assert module.exists() or module.with_suffix(".py").exists(), name


def test_programs_that_make_runs_are_there() -> None:
    for name in set(re.findall(r"python -m (benchmarks[\w.]*)", (ROOT / "Makefile").read_text())):
        module = ROOT / name.replace(".", "/")
        assert module.with_suffix(".py").exists() or (module / "__main__.py").exists(), name


def test_every_example_is_in_its_index() -> None:
    there = {path.name for path in (ROOT / "examples").glob("*.py")} - {"__init__.py"}
    assert there <= set(links(ROOT / "examples" / "README.md"))


@pytest.mark.slow
def test_the_site_is_built_without_a_warning_and_has_every_page(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    run = subprocess.run(
        command, cwd=ROOT, env=os.environ | {"NO_MKDOCS_2_WARNING": "1"}, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    page = (tmp_path / "site" / "reference" / "python" / "index.html").read_text()
    assert 'id="ssd.LLM.generate"' in page and "max_tokens" in page


def test_tables_are_what_results_and_code_say() -> None:
    old = [name for name, text in pages().items() if text != (ROOT / name).read_text()]
    assert not old, "run python -m benchmarks.report"


def results(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text())
    return found


def readme_figures() -> dict[str, list[float]]:
    """The figures of each row of the README's table of speed-ups, from the results, by the beginning of the row."""
    pretrained, bundled = results("growth-gemma"), results("growth")
    rows = {
        (name, row["stream"], row["sampling"]): [row["speedup_last_anew"][0], row["speedup_last"][0]]
        for name, result in (("gemma", pretrained), ("bundled", bundled))
        for row in result["rows"]
    }
    shares = [float(share) for share in re.findall(r"\d+", bundled["rows"][0]["shares"])]
    idle = [row["over_off"][0] for row in results("overhead")["rows"] if row["traffic"] == "cold"]
    inside = {row["batch"]: row["against_suffix"][0] for row in results("vllm")["rows"] if row["method"] == "ssd"}
    memory, again = results("vllm-memory")["parameters"], "A, after a restart"
    after = {
        (row["stream"], row["drafter"], row["memory"]): row["against_none"][0]
        for row in results("vllm-memory")["rows"]
        if row["half"] == "A"
    }

    def beside(dtype: str, *kinds: str) -> list[float]:
        rows = results("engines-gemma")["rows"]
        return [row["ratio"][0] for kind in kinds for row in rows if (row["dtype"], row["what"]) == (dtype, kind)]

    (synthetic,) = results("gpu_check")["repeats"]["results"]
    return {
        "59 % new requests": [*shares, bundled["parameters"]["requests"], *rows["bundled", "mixed", "greedy"]],
        "the same requests, sampled |": rows["bundled", "mixed", "sampled"],
        "requests that never recur": [pretrained["parameters"]["requests"], *rows["gemma", "no repeats", "greedy"]],
        "the same requests, sampled at": rows["gemma", "no repeats", "sampled"],
        "greedy requests, sent a second time |": [pretrained["repeated_requests"]["speedup_second"]],
        "unpredictable text": [min(idle), max(idle)],
        "greedy requests, sent a second time (synthetic": [synthetic["repeated_requests"]["speedup_second"]],
        "inside vLLM (V1 runner), the same": [
            memory["batch"],
            after["mixed", "SSD in vLLM", "empty"],
            after["mixed", "SSD in vLLM", again],
        ],
        "the same with vLLM's suffix decoding": [after["mixed", "vLLM suffix", "empty"]],
        "inside vLLM, recorded prompts": [
            after[stream, "SSD in vLLM", filled] for filled in ("empty", again) for stream in ("sql", "agent_tools")
        ],
        "inside vLLM in one process": [inside[1], inside[4], inside[8]],
        "next to vLLM (compiled)": beside("float32", "no speculation"),
        "next to vLLM with suffix": beside("float32", "drafts, first time", "drafts, again"),
        "the same in bfloat16": beside("bfloat16", "drafts, first time", "drafts, again"),
    }


def test_every_figure_in_the_readme_is_that_of_its_result() -> None:
    table = re.search(r"\| workload \|.*?\n\n", (ROOT / "README.md").read_text(), re.DOTALL)
    assert table is not None
    rows = [row.removeprefix("| ") for row in table[0].strip().split("\n")[2:]]
    figures = readme_figures()
    assert len(rows) == len(figures)
    for row in rows:
        (name,) = (name for name in figures if row.startswith(name))
        written = [
            number.rstrip("x %") for number in re.findall(r"[\d.]+x|\d+ %|(?<=after )\d+|(?<=restart, batch )\d+", row)
        ]
        assert len(written) == len(figures[name]), row
        for text, figure in zip(written, figures[name], strict=True):
            digits = len(text.partition(".")[2])
            assert f"{figure:.{digits}f}" == text, row


def test_a_replay_is_read_at_each_cost_by_settings_of_that_cost() -> None:
    from benchmarks.report.replay import best_speed_up, curve_section

    rows = [
        {
            "trace": trace,
            "tokenizer": "t",
            "drafter": drafter,
            "setting": setting,
            "of_oracle": 0.5 * scale,
            "speed_up": {"measured": measured * scale, "flat 32": free * scale},
        }
        for trace, scale in (("a", 1.0), ("b", 1.5))
        for drafter, setting, measured, free in (
            ("ssd", "priced by measured", 2.0, 1.0),
            ("ssd", "priced by flat 32", 9.0, 6.0),
            ("arctic", "one", 1.0, 2.0),
            ("arctic", "other", 0.5, 3.0),
        )
    ]
    assert [best_speed_up(rows, "ssd", cost, "a") for cost in ("measured", "flat 32")] == pytest.approx([2.0, 6.0])
    assert [best_speed_up(rows, "arctic", cost, "b") for cost in ("measured", "flat 32")] == pytest.approx([1.5, 4.5])
    assert best_speed_up(rows, "ssd") == pytest.approx(2.0 * 1.5**0.5)
    result = {
        "date": "2026-01-01",
        "environment": {"commit": "abc"},
        "rows": rows,
        "parameters": {"tokenizers": ["t"], "max_output_tokens": 10, "draft": {"num_speculative_tokens": 64}},
    }
    page = curve_section(result, result)
    assert "| chain | measured on a CPU | 2.45x | 1.22x | 2.00x (a) ... 2.00x (b) | - |" in page
    assert "| tree | flat up to 32 tokens | 7.35x | 3.67x | 2.00x (a) ... 2.00x (b) | 50% ... 75% |" in page
    assert "2 traces" in page and "2026-01-01 at `abc`" in page


def test_page_that_lost_its_markers_is_refused() -> None:
    from benchmarks.report.__main__ import spliced

    with pytest.raises(SystemExit, match="no markers"):
        spliced("text", "growth", "table")


def test_default_that_changed_without_a_word_is_refused() -> None:
    from benchmarks.report.choices import Choice
    from benchmarks.report.code import constants_section

    chosen = Choice({"IndexConfig.merge_fanout": 4, "IndexConfig.flush_tokens": 4096}, "haste", "a run")
    page = constants_section([chosen, Choice({"IndexConfig.merge_fanout": 4}, "delay")])
    assert "| `merge_fanout`, `flush_tokens` | `4`, `4096` | haste | a run |" in page
    assert "| `merge_fanout` | `4` | delay | not measured |" in page
    for changed, says in (({"IndexConfig.merge_fanout": 5}, "merge_fanout is 4"), ({"IndexConfig.gone": 1}, "is None")):
        with pytest.raises(SystemExit, match=says):
            constants_section([Choice(changed, "haste", "a run")])


def test_nothing_is_shown_of_a_run_that_was_cut_or_wrong(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from benchmarks.report import __main__ as report

    monkeypatch.setattr(report, "RESULTS", tmp_path)
    for name in ("is_cut", "is_wrong"):
        (tmp_path / "growth.json").write_text(json.dumps({name: True, "rows": []}))
        with pytest.raises(SystemExit, match=f"growth {name}: no figure"):
            list(report._results("growth"))
