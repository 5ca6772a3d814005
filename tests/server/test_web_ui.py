"""The page at /, as far as HTTP goes: its files and headers, its counters, and the drafts in streams that it shows."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from server.web_ui.routes import docs_files, ui_files
from ssd.bundled import MODEL_PATH
from ssd.engine import Request, RequestOutput, RequestStats, VerifiedDraft
from tests.server.bundled_engine import load_bundled
from tests.server.client import Answer, ask, get, post
from tests.server.failing_engine import FailingEngine, RunningServer, SayingEngine, serving

PROMPT = "class Point:\n    def __init__(self, x, y):\n        self.x = x\n        self.y = y\n\n    def __"
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
SOURCES = {"context", "recent", "cache", "prebuilt", "prediction", "model", "head", "recycling", "lookahead", "coupled"}


def drafted(port: int, path: str = COMPLETIONS, **fields: Any) -> Answer:
    options = {"include_drafts": True, "include_usage": True}
    body = {"max_tokens": 80, "temperature": 0, "ignore_eos": True, "stream": True, "stream_options": options, **fields}
    return post(port, path, {"prompt": PROMPT, **body} if path == COMPLETIONS else body)


def text_of(choice: dict[str, Any]) -> str:
    return choice["text"] if "text" in choice else choice["delta"].get("content", "")


# -- drafts in streams ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (COMPLETIONS, {}),
        (COMPLETIONS, {"temperature": 1.0, "seed": 3, "n": 3}),
        (COMPLETIONS, {"stop": ["str(x)", "zzz"]}),
        (COMPLETIONS, {"prompt": PROMPT + "é 你", "prediction": {"type": "content", "content": PROMPT}}),
        (CHAT, {"messages": [{"role": "user", "content": "Return the path."}]}),
    ],
)
def test_texts_of_drafts_are_the_text_and_tokens_of_every_pass_are_counted(
    server: RunningServer, path: str, fields: dict[str, Any]
) -> None:
    *chunks, last = drafted(server.port, path, return_token_ids=True, **fields).events
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    passes: dict[int, list[dict[str, Any]]] = {}
    num_tokens = 0
    for choice in choices:
        draft = choice.get("draft")
        if draft is None:
            assert not text_of(choice)
            continue
        passes.setdefault(choice["index"], []).append(draft)
        assert "".join(draft["texts"]) == text_of(choice)
        assert len(draft["texts"]) == len(choice["token_ids"])
        assert draft["num_accepted"] <= min(draft["num_drafted"], len(draft["texts"]))
        assert (draft["source"] in SOURCES) if draft["num_drafted"] else draft["source"] is None
        num_tokens += len(draft["texts"])
    assert num_tokens == last["usage"]["completion_tokens"]
    for of_choice in passes.values():
        assert [draft["pass"] for draft in of_choice] == [*range(1, len(of_choice) + 1)]


def test_a_text_said_before_is_drafted_from_the_index_and_counted_in_the_stats(server: RunningServer) -> None:
    prompt = "def read(path):\n"
    first = drafted(server.port, prompt=prompt).events
    before = get(server.port, "/ui/stats").json
    again = drafted(server.port, prompt=prompt).events
    accepted: dict[str, int] = {}
    drafts = [choice["draft"] for chunk in again for choice in chunk["choices"] if "draft" in choice]
    for draft in drafts:
        accepted[draft["source"]] = accepted.get(draft["source"], 0) + draft["num_accepted"]
    assert sum(accepted.get(source, 0) for source in ("recent", "cache")) > 40
    assert len(again) < len(first)
    after = get(server.port, "/ui/stats").json
    for source, number in accepted.items():
        if number:
            counted = after["sources"][source]["accepted"] - before["sources"].get(source, {"accepted": 0})["accepted"]
            assert counted == number
    assert after["tokens"] - before["tokens"] == 80
    assert after["passes"] - before["passes"] == len(drafts)
    assert sum(after["namespaces"]["default"].values()) > sum(before["namespaces"]["default"].values()) > 0


class DraftingEngine(SayingEngine):
    """Says the prompt in drafts of which all but the last token were accepted."""

    def _advance(self, request: Request, stats: RequestStats) -> RequestOutput:
        output = super()._advance(request, stats)
        return replace(output, draft=VerifiedDraft(stats.num_output_tokens, "recent", 4, len(output.token_ids) - 1))


def test_passes_are_told_of_though_a_call_that_they_spell_is_not_shown_yet() -> None:
    said = 'I ask.<tool_call>{"name": "read", "arguments": {"path": "a"}}</tool_call>'
    tools = [{"type": "function", "function": {"name": "read", "parameters": {"type": "object"}}}]
    with serving(lambda _: DraftingEngine("{{ tools }} <tool_call>")) as running:
        fields = {"messages": [{"role": "user", "content": said}], "tools": tools, "ignore_eos": False}
        *chunks, last = drafted(running.port, CHAT, max_tokens=100, **fields).events
    drafts = [choice["draft"] for chunk in chunks for choice in chunk["choices"] if choice.get("draft")]
    assert "".join(text for draft in drafts for text in draft["texts"]) == said
    assert sum(len(draft["texts"]) for draft in drafts) == last["usage"]["completion_tokens"] == len(said)
    deltas = [choice["delta"] for chunk in chunks for choice in chunk["choices"]]
    assert {} in deltas and "".join(delta.get("content") or "" for delta in deltas) == "I ask."


def test_drafts_are_not_told_where_they_are_to_be_hidden(server: RunningServer) -> None:
    refused = drafted(server.port, stream_options={"include_drafts": True, "include_obfuscation": True})
    assert (refused.status, refused.error["param"]) == (400, "stream_options")
    assert "include_obfuscation" in refused.error["message"]


# -- the page's own files ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def locked() -> Iterator[RunningServer]:
    with serving(lambda _: FailingEngine(), api_keys=("secret",)) as running:
        yield running


TYPES = {
    ".html": "text/html",
    ".css": "text/css",
    ".js": "javascript",
    ".svg": "image/svg+xml",
    ".json": "application/json",
}


def test_every_file_is_open_and_answers_with_headers_that_keep_strangers_out(locked: RunningServer) -> None:
    for path, file in (ui_files() | docs_files()).items():
        found = get(locked.port, path)
        assert (found.status, found.content) == (200, file.read_bytes())
        assert TYPES[file.suffix] in found.headers["content-type"]
        policy = found.headers["content-security-policy"]
        assert "default-src 'self'" in policy and "unsafe" not in policy and "frame-ancestors 'none'" in policy
        assert found.headers["x-content-type-options"] == "nosniff"
        assert found.headers["referrer-policy"] == "no-referrer"
        assert found.headers["x-frame-options"] == "DENY"
        head = ask(locked.port, "HEAD", path)
        assert (head.status, head.content, head.headers["etag"]) == (200, b"", found.headers["etag"])
        known = get(locked.port, path, headers={"if-none-match": found.headers["etag"]})
        assert (known.status, known.content) == (304, b"")
    assert get(locked.port, "/ui/../files.py").status in (401, 404)


def test_files_name_no_other_origin_and_nothing_inline() -> None:
    files = ui_files() | docs_files()
    files["/openapi.json"] = files["/docs"]  # what the framework answers
    for path, file in files.items():
        text = file.read_text()
        links = re.findall(r"""(?:src|href)="([^"#][^"]*)"|from "\./([^"]+)\"""", text)
        for link in links:
            assert f"/{link[0]}" in files or f"/ui/{link[1]}" in files, (path, link)
        assert set(re.findall(r"https?://[^\s\"']+", text)) <= {"http://www.w3.org/2000/svg"}
        assert not re.search(r"""["'`]/\w""", text)  # a proxy may have put a path before all of them
        assert "innerHTML" not in text and "eval(" not in text and "style=" not in text and " onclick" not in text


def test_counters_need_a_key_where_there_are_keys(locked: RunningServer) -> None:
    refused = get(locked.port, "/ui/stats")
    assert (refused.status, refused.error["code"]) == (401, "invalid_api_key")
    found = get(locked.port, "/ui/stats", headers={"authorization": "Bearer secret"})
    assert (found.status, found.json["state"], found.headers["cache-control"]) == (200, "ready", "no-store")


def test_a_tenant_sees_the_sizes_of_its_own_cache_alone() -> None:
    with serving(load_bundled, model=str(MODEL_PATH), api_keys=("alice", "bob")) as running:
        shown = {}
        for key in ("alice", "bob"):
            bearer = {"authorization": f"Bearer {key}"}
            body = {"prompt": f"{PROMPT}{key}", "max_tokens": 8 if key == "alice" else 64}
            assert post(running.port, COMPLETIONS, body, headers=bearer).status == 200
            shown[key] = get(running.port, "/ui/stats", headers=bearer).json["namespaces"]
        sizes = {key: [sum(parts.values()) for parts in found.values()] for key, found in shown.items()}
        assert len(sizes["alice"]) == len(sizes["bob"]) == 1
        assert 0 < sizes["alice"][0] < sizes["bob"][0]
        assert shown["alice"].keys().isdisjoint(shown["bob"])


def test_no_page_leaves_nothing_and_refuses_the_details_of_drafts() -> None:
    body = {"prompt": "abc", "stream": True, "stream_options": {"include_drafts": True}}
    with serving(lambda _: FailingEngine(), no_web_ui=True) as running:
        for path in [*ui_files(), "/ui/stats"]:
            assert get(running.port, path).status == 404
        refused = post(running.port, COMPLETIONS, body)
        assert (refused.status, refused.error["param"]) == (400, "stream_options.include_drafts")
        assert "--no-web-ui" in refused.error["message"]
