"""The page of an evaluation."""

from __future__ import annotations

import math
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cache_builder.evaluation.page import page
from cache_builder.evaluation.plots import Axis, Line, line_plot
from cache_builder.evaluation.values import count, size
from tests.server.browser import BROWSER, DRIVER, chromium

EVALUATION: dict[str, Any] = {
    "report": "evaluate",
    "date": "2026-11-22",
    "version": "1.2.3",
    "parameters": {"cache": "growing", "warm": ["a", "b"]},
    "inputs": ["monday.jsonl"],
    "tokenizer": "some-tokenizer",
    "requests": 1200,
    "prompt_tokens": 3_000_000,
    "output_tokens": 240_000,
    "speedup": 1.84,
    "tokens_per_step": 2.11,
    "drafted_per_step": 4.5,
    "acceptance_rate": 0.25,
    "cost": {
        "name": "measured", "source": "measured: some-model", "widths": [1, 2, 65], "costs": [1, 1.1, 2.2],
        "step_ms": 4.5, "overhead": 0.05, "recycling": 1.2,
    },
    "classes": [
        {"name": "asked again", "requests": 200, "output_tokens": 40_000, "tokens_per_step": 8.0, "speedup": 6.0},
        {"name": "new text", "requests": 1000, "output_tokens": 200_000, "tokens_per_step": 1.1, "speedup": 0.97},
    ],
    "acceptance_by_position": [{"position": at, "drafted": 100, "accepted": 60 - at} for at in range(1, 20)],
    "class_definitions": {"asked again": "the same prompt came before"},
    "by_cache": [{"cache": "none", "speedup": 1.3}, {"cache": "growing", "speedup": 1.84}],
    "by_source": [{"source": "own", "drafted": 90, "accepted": 30}, {"source": "tail", "drafted": 9, "accepted": 9}],
    "growth": [{"requests": 300 * (1 + at), "tokens_per_step": 2.0, "speedup": 1.2 + at} for at in range(4)],
    "by_capacity": [{"capacity_tokens": 10**at, "speedup": 1.2, "bytes": 10 * 10**at} for at in (4, 5)],
    "by_draft_limit": [{"limit": 2**at, "drafted_per_step": 3.0, "speedup": 1.5} for at in range(2, 7)],
    "sharing": [
        {"replicas": count, "is_shared": is_shared, "tokens_per_step": 2.0, "speedup": 1.5}
        for count in (1, 4)
        for is_shared in (True, False)
    ],
    "needs": {"memory_bytes": 3e8, "disk_bytes": 1e8, "redis_bytes_per_request": 4900, "propose_us": 30},
    "unknown": ["Whether tomorrow repeats as much.", "What sampling does."],
}  # fmt: skip
TITLES = {
    "By class of traffic": "classes",
    "It grows with use": "growth",
    "How far drafts hold": "acceptance_by_position",
    "What the cache adds": "by_cache",
    "Where drafts come from": "by_source",
    "How large the cache should be": "by_capacity",
    "How long drafts may be": "by_draft_limit",
    "What sharing brings": "sharing",
    "What a pass costs": "cost",
    "What it needs": "needs",
    "What a replay cannot know": "unknown",
}
VOID = {"meta", "br", "link", "img", "input", "hr"}


class Reader(HTMLParser):
    """Checks that elements close in order, and keeps what there is."""

    def __init__(self, html: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.titles: list[str] = []
        self.feed(html)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        names = [name for name, _ in attrs]
        assert len(names) == len(set(names)), f"an attribute twice in {tag}"
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)
        if self.open and self.open[-1] == "h2":
            self.titles.append(data)

    @property
    def text(self) -> str:
        return " ".join(self.texts)


def test_it_is_sound_html_with_a_plot_and_a_table_for_every_part() -> None:
    found = Reader(page(EVALUATION))
    assert found.titles == list(TITLES)
    plots = [attributes for tag, attributes in found.tags if tag == "svg"]
    assert len(plots) == 6
    ids = [attributes["id"] for _, attributes in found.tags if "id" in attributes]
    assert len(ids) == len(set(ids))
    for attributes in plots:  # said to who does not see it
        assert attributes["role"] == "img"
        assert set(str(attributes["aria-labelledby"]).split()) <= set(ids)
    assert sum(tag == "table" for tag, _ in found.tags) == 8
    for said in ("1.84", "2.11", "1,200", "240k", "asked again", "0.97", "286 MiB", "4.79 KiB", "measured: some-model"):
        assert said.casefold() in found.text.casefold(), said


def test_it_asks_nobody_for_anything_and_runs_nothing() -> None:
    html = page(EVALUATION)
    found = Reader(html)
    assert not {tag for tag, _ in found.tags} & {"script", "link", "img", "iframe", "object", "form", "a", "base"}
    for _, attributes in found.tags:
        assert not [name for name in attributes if name.startswith("on") or name in ("src", "href", "xlink:href")]
    assert "url(" not in html and "@import" not in html and "http:" not in html and "https:" not in html
    policy = next(attributes["content"] for _, attributes in found.tags if "http-equiv" in attributes)
    assert str(policy).startswith("default-src 'none'; style-src 'unsafe-inline'")


@pytest.mark.parametrize(("title", "key"), TITLES.items())
def test_what_is_missing_or_empty_is_left_out(title: str, key: str) -> None:
    for changed in ({**EVALUATION, key: None}, {**EVALUATION, key: type(EVALUATION[key])()}):
        assert Reader(page(changed)).titles == [other for other in TITLES if other != title]
    assert title not in Reader(page({name: value for name, value in EVALUATION.items() if name != key})).titles


def test_an_evaluation_of_nothing_is_a_page_too() -> None:
    assert Reader(page({})).titles == []


@pytest.mark.parametrize(
    "hostile",
    ["</style><script>alert(1)</script>", '"><img src=x onerror=alert(1)>', "a&lt;b", "'\" onload='x", "\u202e\0"],
)
def test_what_logs_call_things_is_shown_and_never_obeyed(hostile: str) -> None:
    row = {"name": hostile, "requests": 3, "output_tokens": 9, "tokens_per_step": 1.0, "speedup": 1.0}
    changed = {
        **EVALUATION,
        "classes": [row], "class_definitions": {hostile: hostile},
        "by_source": [{"source": hostile, "drafted": 3, "accepted": 2}],
        "inputs": [hostile], "tokenizer": hostile, "unknown": [hostile], "version": hostile,
        "parameters": {hostile: [hostile]}, "cost": {**EVALUATION["cost"], "source": hostile},
    }  # fmt: skip
    found, usual = Reader(page(changed)), Reader(page(EVALUATION))
    assert {tag for tag, _ in found.tags} <= {tag for tag, _ in usual.tags}
    names = {name for _, attributes in usual.tags for name in attributes}
    assert {name for _, attributes in found.tags for name in attributes} <= names
    assert found.text.count(hostile.replace("\0", "\ufffd")) >= 7 or "\0" in hostile


def _anything() -> st.SearchStrategy[Any]:
    leaves = st.none() | st.booleans() | st.integers(-5, 10**12) | st.floats() | st.text(max_size=4)
    keys = st.sampled_from(
        ["speedup", "requests", "position", "drafted", "accepted", "limit", "replicas", "widths", "costs", "name"]
    )
    return st.recursive(
        leaves, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=5), max_leaves=10
    )


@settings(max_examples=40)
@given(st.dictionaries(st.sampled_from(sorted(EVALUATION)), _anything(), max_size=6))
def test_whatever_it_is_given_makes_a_sound_page(evaluation: dict[str, Any]) -> None:
    html = page({**EVALUATION, **evaluation})
    Reader(html)
    assert "nan%" not in html and "inf%" not in html


@given(
    st.lists(st.tuples(st.floats(0, 1e9), st.floats(-10, 1e6)), min_size=1, max_size=30),
    st.booleans(),
    st.none() | st.floats(0, 100),
)
def test_what_is_drawn_lies_inside_its_plot(
    points: list[tuple[float, float]], is_log: bool, mark: float | None
) -> None:
    axis = Axis("x", lambda value: f"{value:g}", is_log)
    drawn = Reader(line_plot("key", "title", [Line("a", sorted(points))], axis, axis, mark=mark))
    for tag, attributes in drawn.tags:
        if tag == "path":
            path = str(attributes["d"]).replace("M", " ").replace("L", " ").replace("H100", "").replace("h0", "")
            assert all(0 <= float(number) <= 100 for number in path.split()), path


@pytest.mark.parametrize(
    ("number", "said"),
    [(0, "0"), (999, "999"), (9_999, "9,999"), (10_000, "10k"), (123_456, "123k"), (4_812_330, "4.81M"), (3e9, "3B")],
)
def test_numbers_are_written_short(number: float, said: str) -> None:
    assert count(number) == said


def test_sizes_are_written_with_their_unit() -> None:
    assert [size(number) for number in (0, 900, 4096, 3e8, 2e12)] == ["0 B", "900 B", "4 KiB", "286 MiB", "1.82 TiB"]


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None or DRIVER is None, reason="no Chromium with its driver")
def test_a_browser_shows_it_at_every_width_without_a_complaint(tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    path.write_text(page(EVALUATION))
    with chromium() as browser:
        for width in (320, 800, 1400):
            browser.resize(width, 900)
            browser.driver.get(path.as_uri())
            assert browser.script("return document.documentElement.scrollWidth") <= width
            heights = browser.script("return [...document.querySelectorAll('svg')].map(one => one.clientHeight)")
            assert min(heights) > 100
            assert math.isclose(browser.script("return document.querySelectorAll('section').length"), len(TITLES))
        assert browser.complaints() == []
