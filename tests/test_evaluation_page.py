"""The page of an evaluation."""

from __future__ import annotations

import sys
from html.parser import HTMLParser
from typing import Any

import pytest

from cache_builder.evaluation.report import page, summary

STEPS = {"tokens_per_step": 2.0, "speedup": 1.5}
EVALUATION: dict[str, Any] = {
    "report": "evaluate",
    "date": "2026-11-22",
    "version": "1.2.3",
    "parameters": {"cache": "growing", "warm": ["a", "b"], "draft_limit": 16},
    "inputs": ["monday.jsonl"],
    "tokenizer": "some-tokenizer",
    "requests": 1200,
    "prompt_tokens": 3_000_000,
    "output_tokens": 240_000,
    "speedup": 1.84,
    "tokens_per_step": 2.11,
    "drafted_per_step": 4.5,
    "acceptance_rate": 0.25,
    "cost": {"source": "measured: some-model", "widths": [1, 2, 65], "costs": [1, 1.1, 2.2]},
    "classes": [
        {"name": "asked again", "requests": 200, "output_tokens": 40_000, "tokens_per_step": 8.0, "speedup": 6.0},
        {"name": "new text", "requests": 1000, "output_tokens": 200_000, "tokens_per_step": 1.1, "speedup": 0.97},
    ],
    "acceptance_by_position": [{"position": at, "drafted": 100, "accepted": 60 - at} for at in range(1, 20)],
    "by_cache": [{"cache": "none", **STEPS}, {"cache": "growing", **STEPS}],
    "by_source": [{"source": "own", "drafted": 90, "accepted": 30}, {"source": "tail", "drafted": 9, "accepted": 9}],
    "growth": [{"requests": 300 * (1 + at), **STEPS} for at in range(4)],
    "needs": {
        "memory_bytes": 300_000_000, "disk_bytes": 100_000_000, "cached_tokens": 9000, "propose_us": 30,
    },
    "documents": {"number": 0},
    "unknown": ["Whether tomorrow repeats as much.", "What sampling does."],
}  # fmt: skip
CURVES = ("growth", "acceptance_by_position")
VOID = {"meta", "br", "link", "img", "input", "hr"}


class Reader(HTMLParser):
    """Checks that elements close in order, and keeps what there is."""

    def __init__(self, html: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.feed(html)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)

    def count(self, tag: str) -> int:
        return sum(name == tag for name, _ in self.tags)

    @property
    def text(self) -> str:
        return " ".join(self.texts)


def test_it_is_sound_html_with_what_the_terminal_shows_and_a_picture_for_every_curve(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = Reader(page(EVALUATION))
    assert found.count("img") == len(CURVES) and summary(EVALUATION) in found.text
    for said in ("1.84", "2.11", "1,200", "asked again", "0.97", "300.0 MB", "some-tokenizer", "tomorrow"):
        assert said in found.text, said
    assert "What the cache adds" not in page({**EVALUATION, "by_cache": []})
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert Reader(page(EVALUATION)).count("img") == 0


def test_it_asks_nobody_for_anything_and_runs_nothing() -> None:
    html = page(EVALUATION)
    found = Reader(html)
    assert not {tag for tag, _ in found.tags} & {"script", "link", "iframe", "object", "form", "a", "base", "svg"}
    for _, attributes in found.tags:
        assert not [name for name in attributes if name.startswith("on") or name in ("href", "xlink:href")]
        assert str(attributes.get("src", "data:image/png;base64,")).startswith("data:image/png;base64,")
    assert "url(" not in html and "@import" not in html and "http:" not in html and "https:" not in html
    policy = next(attributes["content"] for _, attributes in found.tags if "http-equiv" in attributes)
    assert str(policy).startswith("default-src 'none'; img-src data:")


@pytest.mark.parametrize(
    "hostile",
    ["</style><script>alert(1)</script>", '"><img src=x onerror=alert(1)>', "a&lt;b", "'\" onload='x", "\u202e\0"],
)
def test_what_logs_call_things_is_shown_and_never_obeyed(hostile: str) -> None:
    row = {"name": hostile, "requests": 3, "output_tokens": 9, "tokens_per_step": 1.0, "speedup": 1.0}
    changed = {
        **EVALUATION,
        "classes": [row, row],
        "by_source": [{"source": hostile, "drafted": 3, "accepted": 2}, *EVALUATION["by_source"][:1]],
        "inputs": [hostile], "tokenizer": hostile, "unknown": [hostile, hostile], "version": hostile,
        "parameters": {**EVALUATION["parameters"], hostile: [hostile]},
    }  # fmt: skip
    found, usual = Reader(page(changed)), Reader(page(EVALUATION))
    assert [tag for tag, _ in found.tags] == [tag for tag, _ in usual.tags]
    names = {name for _, attributes in usual.tags for name in attributes}
    assert {name for _, attributes in found.tags for name in attributes} <= names
    assert found.text.count(hostile.replace("\0", "\ufffd")) >= 6 or "\0" in hostile
