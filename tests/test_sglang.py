"""The corpus for SGLang: driven as SGLang 0.5 drives one, and once by SGLang's own worker."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cache_builder.__main__ import main
from ssd.bundled import MODEL_PATH
from ssd.integrations import sglang, sglang_plugin
from ssd.integrations.sglang import SsdCorpus, remember_server
from tests.cache_files import write_cache

ROOT = Path(__file__).parent.parent
SIZE = 6
ARGUMENTS = SimpleNamespace(model_path=str(MODEL_PATH), tokenizer_path=None, tp_size=1, context_length=400)


def text(seed: int, length: int = 80) -> list[int]:
    return np.random.default_rng(seed).integers(1, 4000, length).tolist()


@pytest.fixture
def corpus() -> Iterator[SsdCorpus]:
    remember_server(None, ARGUMENTS)
    made = SsdCorpus(draft_token_num=SIZE, max_trie_depth=18, capacity=1000)
    yield made
    made.cache.close()


def drafts_of(corpus: SsdCorpus, requests: dict[str, list[int]]) -> list[tuple[list[int], list[list[bool]]]]:
    """Ask for the trees of requests with these texts, of which the worker passes the end, and check their form."""
    tails = [tokens[-18:] for tokens in requests.values()]
    tokens, mask = corpus.batch_get(list(requests), tails, list(map(len, requests.values())))
    assert tokens.dtype == np.int64 and mask.dtype == np.bool_
    trees, masks = tokens.reshape(-1, SIZE), mask.reshape(-1, SIZE, SIZE)
    for tail, tree, sees in zip(tails, trees, masks, strict=True):
        assert tree[0] == tail[-1] and sees[:, 0].all() and sees.diagonal().all() and not np.triu(sees, 1).any()
        for node in range(1, SIZE):
            parent = max(np.flatnonzero(sees[node, :node]))
            assert np.array_equal(sees[node, :node], sees[parent, :node]), "it sees what its parent sees, and itself"
    return [(tree.tolist(), sees.tolist()) for tree, sees in zip(trees, masks, strict=True)]


def test_a_finished_text_is_drafted_and_a_prompt_counts_whole(corpus: SsdCorpus) -> None:
    script = text(1)
    corpus.start_requests([("a", script[:40])])
    for length in range(41, 80):
        drafts_of(corpus, {"a": script[:length]})
    corpus.erase_match_state(["a", "unknown"])
    assert corpus.cache.stats().num_stored == 1
    corpus.start_requests([("b", script[:40])])
    ((tree, _),) = drafts_of(corpus, {"b": script[:41]})
    assert tree == script[40 : 40 + SIZE], "the chain that followed"
    assert corpus.num_failures == 0


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(data=st.data())
def test_trees_are_valid_whatever_the_worker_passes(corpus: SsdCorpus, data: st.DataObject) -> None:
    """Requests come, go, are preempted, take leaps, and share text."""
    texts: dict[str, list[int]] = {}
    for step in range(data.draw(st.integers(1, 25))):
        if len(texts) < 4 and data.draw(st.booleans()):
            name = f"{data.draw(st.integers(0, 3))}-{step}"
            texts[name] = text(int(name[0]), data.draw(st.integers(1, 60)))
            if data.draw(st.booleans()):
                corpus.start_requests([(name, texts[name])])
        for name in list(texts):
            texts[name] = (texts[name] + text(int(name[0]) + 9, data.draw(st.sampled_from([1, 1, 2, 5, 30]))))[-390:]
        if texts:
            drafts_of(corpus, texts)
        if texts and data.draw(st.integers(0, 4)) == 0:
            corpus.erase_match_state([name for name in list(texts) if texts.pop(name)][:2])
    corpus.reset()
    assert corpus.cache.stats().num_running == 0 and corpus.num_failures == 0


def test_a_failure_costs_only_drafts(
    corpus: SsdCorpus, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(corpus.cache, "speculate_trees", None)
    with caplog.at_level(logging.ERROR):
        for length in range(10, 15):
            ((tree, _),) = drafts_of(corpus, {"a": text(1)[:length]})
            assert tree[1:] == [0] * (SIZE - 1)
    assert corpus.num_failures == 5 and len(caplog.records) == 3


def test_corpora_of_clients_are_drafted_from(corpus: SsdCorpus) -> None:
    assert corpus.load_external_corpus_named("docs", [text(5), text(6)]) == 160
    corpus.commit_external_corpus_load("docs", 160)
    assert corpus.list_external_corpora() == {"docs": 160} and corpus.remaining_token_budget > 0
    with pytest.raises(ValueError, match="exists already"):
        corpus.load_external_corpus_named("docs", [])
    corpus.start_requests([("a", text(6)[:20])])
    ((tree, _),) = drafts_of(corpus, {"a": text(6)[:21]})
    assert tree == text(6)[20 : 20 + SIZE]
    corpus.remove_external_corpus("docs")
    assert corpus.list_external_corpora() == {}


def test_nothing_is_changed_without_a_setting_or_with_another_sglang(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    for name in ("SSD_CACHE_DIR", "SSD_REDIS_URL", "SSD_WARM_DIRS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(sglang_plugin, "missing_hooks", lambda _: pytest.fail("it looks"))
    sglang_plugin.register()
    monkeypatch.setenv("SSD_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(sglang_plugin, "missing_hooks", lambda _: ["there is no thing"])
    with caplog.at_level(logging.WARNING):
        sglang_plugin.register()
    (record,) = caplog.records
    assert "there is no thing" in record.getMessage() and "drafts from its own n-gram corpus" in record.getMessage()


def test_several_ranks_keep_sglangs_corpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sglang, "_server_args", SimpleNamespace(tp_size=2))
    monkeypatch.setattr(sglang, "_own_corpus", lambda: SimpleNamespace)
    assert vars(SsdCorpus(draft_token_num=4)) == {"draft_token_num": 4}


class _Sglang(BaseHTTPRequestHandler):
    """SGLang's endpoint: it accepts a corpus once."""

    bodies: ClassVar[list[dict[str, Any]]] = []

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        known = body["corpus_id"] in [each["corpus_id"] for each in self.bodies]
        self.bodies.append(body | {"path": self.path, "key": self.headers["authorization"]})
        self.send_response(400 if known else 200)
        self.end_headers()
        count = sum(map(len, body["token_chunks"]))
        self.wfile.write(json.dumps({"success": not known, "message": "exists", "loaded_token_count": count}).encode())

    def log_message(self, *_: object) -> None:
        pass


def test_a_cache_is_pushed_to_a_running_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = [text(1), text(2), text(3)]
    write_cache(tmp_path / "warm", texts)
    monkeypatch.setenv("SGLANG_API_KEY", "key")
    monkeypatch.setattr(_Sglang, "bodies", [])
    with HTTPServer(("127.0.0.1", 0), _Sglang) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_address[1]}"
        assert main(["push", str(tmp_path / "warm"), "--sglang", url]) == 0
        assert "240 tokens in 3 sequences" in capsys.readouterr().out
        assert main(["push", str(tmp_path / "warm"), "--sglang", url]) == 2
        assert "status 400" in capsys.readouterr().err
        server.shutdown()
    first = _Sglang.bodies[0]
    assert (first["path"], first["key"], first["token_chunks"]) == ("/add_external_corpus", "Bearer key", texts)
    assert main(["push", str(tmp_path / "warm"), "--sglang", url]) == 2
    assert "does not answer" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.skipif(not (ROOT / ".venv-sglang" / ".ready").exists(), reason="run `make .venv-sglang/.ready`")
def test_sglangs_own_worker_drafts_from_it(tmp_path: Path) -> None:
    packages = str(ROOT / ".venv-sglang")
    environment = os.environ | {"SSD_CACHE_DIR": str(tmp_path), "PYTHONPATH": packages}
    done = subprocess.run(
        [sys.executable, "-m", "tests.sglang_worker", packages],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    first, again = found.pop("steps")
    assert found == {"is_ours": True, "equal": True, "failures": 0, "stored": 4, "running": 0}
    assert again < first / 3
