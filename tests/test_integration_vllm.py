"""The proposer for vLLM: driven as vLLM 0.32 drives one, and once inside vLLM itself where that is installed."""

from __future__ import annotations

import gc
import json
import logging
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ssd.bundled import MODEL_PATH
from ssd.config import CacheConfig, SamplingParams
from ssd.errors import CacheLocked, ConfigError, ModelError
from ssd.integrations import vllm_plugin
from ssd.integrations.vllm import SuffixProposer
from ssd.integrations.vllm_hooks import LENGTHS, Hook
from ssd.replication.replication_log import ReplicationLog
from ssd.retrieval.cache_manager import CacheManager
from ssd.text.codec import TextCodec
from tests.redis_server import RedisServer, redis_server
from tests.server.client import wait_until
from tests.sharing_replica import stored
from tests.vllm_runners import MAX_MODEL_LEN, Scripted, VllmBatch, finishing, learned_by, scripted, vllm_config

__all__ = ["redis_server"]

ROOT = Path(__file__).parent.parent
VLLM = ROOT / ".venv-vllm"

Text = tuple[int, ...]


WATCH = vllm_plugin.wrap_v1_runner


@pytest.fixture(autouse=True)
def _steps_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the tests, where vLLM's runner would be watched."""
    monkeypatch.setattr(vllm_plugin, "wrap_v1_runner", lambda: True)


@pytest.fixture
def proposer() -> Iterator[SuffixProposer]:
    made = SuffixProposer(vllm_config())
    yield made
    made.close()


# Drafting and learning


def test_drafts_end_with_the_end_of_text_and_so_does_what_is_learned(proposer: SuffixProposer) -> None:
    learned = learned_by(proposer)
    request = scripted(3, max_tokens=30)
    request.output[20] = 0  # the bundled model's end of text; the script goes on behind it
    for name in "ab":
        batch = VllmBatch()
        batch.add(name, Scripted(request.prompt, request.output, 30 if name == "a" else 21))
        drafts = []
        while not batch.finished():
            drafts += batch.step(proposer)
        assert all(0 not in draft[:-1] for draft in drafts)
        proposer.on_finished(batch.runner, finishing([name]))
    assert learned[0][-1] != 0, "an end of text that more was said after is text"
    assert learned[1][-1] == 0


def test_drafts_leave_room_for_the_targets_own_token(proposer: SuffixProposer) -> None:
    text = [7, 8, 9] * (MAX_MODEL_LEN // 3)
    for length in (MAX_MODEL_LEN - 4, MAX_MODEL_LEN - 1, MAX_MODEL_LEN):
        batch = VllmBatch(limit=max(0, MAX_MODEL_LEN - length - 1))
        batch.add("long", Scripted(text[: length - 1], [*text[length - 1 :], 7], 1))
        batch.step(proposer)
    assert proposer.stats().num_failures == 0


def test_foreign_lengths_cost_drafts_and_nothing_else(
    proposer: SuffixProposer, caplog: pytest.LogCaptureFixture
) -> None:
    batch = VllmBatch()
    batch.add("a", scripted(5))
    proposer.on_finished(batch.runner, finishing(()))
    rows, lengths = batch.token_ids_cpu, batch.num_tokens_no_spec
    assert proposer.propose([[1, 2]], np.zeros(8, np.int32), rows) == [[]]
    assert proposer.propose([[1]], np.full(8, MAX_MODEL_LEN + 1, np.int32), rows) == [[]]
    assert proposer.propose([[1]] * 20, np.full(20, 5, np.int32), rows)[8:] == [[]] * 12
    assert proposer.propose([], lengths, rows) == []
    assert proposer.stats().num_failures == 0
    with caplog.at_level(logging.ERROR):
        for _ in range(5):
            assert proposer.propose([[1]], None, rows) == [[]]  # type: ignore[arg-type]
    assert proposer.stats().num_failures == 5
    assert len(caplog.records) == 3, "the 1st, 2nd and 4th"


def test_a_proposer_that_vllm_drops_keeps_what_it_learned(tmp_path: Path) -> None:
    proposer = SuffixProposer(vllm_config(cache_dir=str(tmp_path)))
    batch = VllmBatch()
    batch.add("a", scripted(11))
    for _ in range(5):
        batch.step(proposer)
    del proposer
    gc.collect()
    codec = TextCodec.load(str(MODEL_PATH))
    with CacheManager(CacheConfig(directory=tmp_path), codec.fingerprint) as caches:
        assert batch.requests["a"].text in stored(caches)


# Which request is a row


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_every_request_is_learned_once_however_rows_move(data: st.DataObject, _steps_are_told: None) -> None:
    proposer = SuffixProposer(vllm_config())
    learned, truth, numbers = learned_by(proposer), Counter[Text](), iter(range(1000))
    batch = VllmBatch()
    preempted: dict[str, Scripted] = {}
    for _ in range(data.draw(st.integers(5, 30), label="steps")):
        over = batch.finished()
        proposer.on_finished(batch.runner, finishing(over))
        truth.update(tuple(batch.finish(name).text) for name in over)
        assert Counter(learned) == truth, "each as it ended"
        if data.draw(st.booleans(), label="resume") and preempted:
            batch.add(*preempted.popitem())
        room = 8 - len(batch.req_ids) - len(preempted)
        for seed in data.draw(st.lists(st.integers(0, 2), max_size=min(2, room)), label="new") if room else []:
            max_tokens = data.draw(st.integers(1, 10))
            batch.add(f"{seed}-{next(numbers)}", scripted(seed, num_output=80, max_tokens=max_tokens))
        if len(batch.req_ids) > 1:
            if data.draw(st.booleans(), label="swap"):
                batch.swap(*data.draw(st.permutations(range(len(batch.req_ids))))[:2])
            if data.draw(st.integers(0, 5), label="preempt") == 0:
                name = data.draw(st.sampled_from(batch.req_ids))
                preempted[name] = batch.requests[name]
                batch.remove(name)
        waiting = {name for name in batch.req_ids if not batch.requests[name].said and data.draw(st.booleans())}
        batch.step(proposer, waiting)
        if data.draw(st.integers(0, 5), label="without a call") == 0:
            batch.sample(waiting)
    assert proposer.stats().num_failures == 0
    over = list(batch.requests)
    truth.update(tuple(request.text) for request in batch.requests.values() if request.said)
    proposer.on_finished(batch.runner, finishing(over))
    assert Counter(learned) == truth
    proposer.close()


def test_no_more_is_drafted_than_the_scheduler_says(proposer: SuffixProposer) -> None:
    repeats = [7, 8, 9] * 40
    batch = VllmBatch()
    batch.add("a", Scripted(repeats[:30], repeats[30:], 80))
    lengths = []
    for most in (8, 2, 0, 0, 8):
        proposer.on_finished(batch.runner, finishing((), most))
        (draft,) = proposer.propose(batch.sample(), batch.num_tokens_no_spec, batch.token_ids_cpu)
        batch.drafts["a"] = draft
        lengths.append(len(draft))
    assert lengths == [8, 2, 0, 0, 8], "and what was said meanwhile is known"
    assert proposer.stats().num_failures == 0


def test_a_prompt_that_is_no_text_is_not_learned(proposer: SuffixProposer) -> None:
    learned = learned_by(proposer)
    batch = VllmBatch()
    batch.add("text", scripted(3))
    batch.add("embedded", scripted(4))
    batch.req_prompt_embeds = {1: object()}
    for _ in range(4):
        batch.step(proposer)
    text = tuple(batch.requests["text"].text)
    proposer.on_finished(batch.runner, finishing(["text", "embedded"]))
    assert learned == [text]
    assert proposer.stats().num_failures == 0


def test_a_batch_that_is_not_the_runners_is_drafted_nothing_for(proposer: SuffixProposer) -> None:
    batch, other = VllmBatch(), VllmBatch()
    batch.add("a", scripted(31))
    proposer.on_finished(other.runner, finishing(()))
    assert proposer.propose(batch.sample(), batch.num_tokens_no_spec, batch.token_ids_cpu) == [[]]
    assert proposer.stats().num_failures == 0


# What is done to vLLM's runner


class FakeRunner:
    """Has the two methods that are wrapped; stands in for vLLM's where that is not installed."""

    def __init__(self, drafter: object, batch: VllmBatch) -> None:
        self.drafter = drafter
        self.input_batch = batch
        self.requests = batch.requests
        self.calls: list[str] = []

    def _update_states(self, scheduler_output: SimpleNamespace) -> str:
        for name in scheduler_output.finished_req_ids:
            self.requests.pop(name)
        self.calls.append("update")
        return "corrections"

    def shutdown(self) -> None:
        self.calls.append("shutdown")


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> type[FakeRunner]:
    class Runner(FakeRunner):
        pass

    monkeypatch.setitem(sys.modules, "vllm.v1.worker.gpu_model_runner", SimpleNamespace(GPUModelRunner=Runner))
    monkeypatch.setattr(vllm_plugin, "V1_HOOKS", ())  # which are looked for in sources
    monkeypatch.setattr(vllm_plugin, "wrap_v1_runner", WATCH)
    return Runner


def test_the_plugin_tells_of_steps_and_of_the_end(watched: type[FakeRunner]) -> None:
    proposers = [SuffixProposer(vllm_config()) for _ in range(2)]  # the second finds the runner watched already
    batch = VllmBatch()
    runner = watched(proposers[1], batch)
    learned = learned_by(proposers[1])
    batch.add("a", scripted(60))
    assert runner._update_states(finishing(())) == "corrections"
    batch.step(proposers[1])
    text = tuple(batch.requests["a"].text)
    runner._update_states(finishing(["a"]))
    assert learned == [text]
    assert runner.calls == ["update", "update"]
    runner.shutdown()
    assert runner.calls[-1] == "shutdown"
    assert proposers[1].propose([[1]], batch.num_tokens_no_spec, batch.token_ids_cpu) == [[]], "closed"
    assert proposers[1].stats().num_stored == 1
    proposers[0].close()


def test_other_drafters_are_left_alone(watched: type[FakeRunner]) -> None:
    SuffixProposer(vllm_config()).close()
    runner = watched(object(), VllmBatch())
    assert runner._update_states(finishing(())) == "corrections"
    runner.shutdown()


def test_a_runner_that_lacks_something_is_left_alone(
    watched: type[FakeRunner], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(vllm_plugin, "V1_HOOKS", (Hook("engine_of_nobody", "make", ()),) * 2)
    original = watched.shutdown
    proposer = SuffixProposer(vllm_config())
    assert caplog.messages[-1] == (
        "SSD does not support the V1 model runner of the installed vLLM: there is no "
        "engine_of_nobody:make, and 1 more. Requests are served without drafts"
    )
    assert watched.shutdown is original
    assert proposer.propose([[1]], np.zeros(1, np.int32), np.zeros((1, 4), np.int32)) == [[]]


def test_what_is_learned_ends_where_the_clients_answer_does(proposer: SuffixProposer) -> None:
    learned = learned_by(proposer)
    batch = VllmBatch()
    batch.add("a", scripted(30, max_tokens=20))
    proposer.on_finished(batch.runner, finishing(()))
    for _ in range(6):
        batch.step(proposer)
    output = finishing(["a"])
    setattr(output, LENGTHS, {"a": 23})
    proposer.on_finished(batch.runner, output)
    assert learned == [tuple(batch.requests["a"].text[:23])]


@pytest.mark.parametrize(("version", "warns"), [("0.32.4", False), ("0.99.0", True)])
def test_an_untested_version_is_warned_about(
    version: str, warns: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(__version__=version))
    SuffixProposer(vllm_config()).close()
    assert ("only with 0.32.x" in caplog.text) == warns


# Settings


def test_unknown_settings_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"unknown settings \(cache_directory\): use .*cache_dir"):
        SuffixProposer(vllm_config(cache_directory="x"))
    config = vllm_config()
    config.additional_config = {"ssd": "cache_dir=x"}
    with pytest.raises(ConfigError, match="must be an object"):
        SuffixProposer(config)


def test_the_engines_configuration_wins_over_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SSD_CACHE_DIR", str(tmp_path / "environment"))
    monkeypatch.setenv("SSD_NAMESPACE", "team")
    monkeypatch.setenv("SSD_CAPACITY_TOKENS", "100000")
    SuffixProposer(vllm_config(cache_dir=str(tmp_path / "configuration"))).close()
    assert sorted(path.name for path in (tmp_path / "configuration").iterdir()) == ["team"]
    assert not (tmp_path / "environment").exists()
    monkeypatch.setenv("SSD_CAPACITY_TOKENS", "many")
    with pytest.raises(ConfigError, match="SSD_CAPACITY_TOKENS must be a whole number, got 'many'"):
        SuffixProposer(vllm_config())


@pytest.mark.parametrize(
    ("rank", "size"),
    [("data_parallel_rank", "data_parallel_size"), ("data_parallel_index", "elastic_ep_max_dp_size")],
    ids=["a group", "engines of a dense model, whose size and rank are those of one alone"],
)
def test_engines_that_are_parallel_have_directories_of_their_own(rank: str, size: str, tmp_path: Path) -> None:
    proposers = []
    for number in range(2):
        config = vllm_config(cache_dir=str(tmp_path))
        vars(config.parallel_config).update({size: 2, rank: number})
        proposers.append(SuffixProposer(config))
    with pytest.raises(CacheLocked):
        SuffixProposer(config)
    for proposer in proposers:
        proposer.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rank-0", "rank-1"]


def test_sharing_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    config = vllm_config(tokenizer=str(tmp_path / "none"), cache_dir=str(tmp_path / "cache"))
    with pytest.raises(ModelError, match="SSD_TOKENIZER"):
        SuffixProposer(config)
    SuffixProposer(vllm_config(tokenizer=str(tmp_path / "none"))).close()


def test_a_tokenizer_with_code_of_its_own_is_loaded_where_vllm_may(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.syspath_prepend(tmp_path / "modules")
    own = tmp_path / "own"
    own.mkdir()
    (own / "tokenizer.json").write_bytes((MODEL_PATH / "tokenizer.json").read_bytes())
    (own / "tokens.py").write_text(
        "from transformers import PreTrainedTokenizerFast\n\n\nclass Tokens(PreTrainedTokenizerFast):\n    pass\n"
    )
    (own / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "Tokens", "auto_map": {"AutoTokenizer": [None, "tokens.Tokens"]}})
    )
    config = vllm_config(tokenizer=str(own), cache_dir=str(tmp_path / "cache"))
    with pytest.raises(ModelError, match="contains custom code"):
        SuffixProposer(config)
    config.model_config.trust_remote_code = True
    SuffixProposer(config).close()


# One cache, several engines


def engine_outputs(cache: CacheManager, prompt: list[int]) -> list[int]:
    """What our own engine says, learning it."""
    from ssd import Engine

    engine = Engine.from_pretrained(MODEL_PATH, dtype="float32", device="cpu", caches=cache)
    sampling = SamplingParams(max_tokens=40, temperature=0.0)
    return [token for output in engine.generate([prompt], sampling) for token in output.token_ids]


def test_a_directory_serves_our_engine_and_vllm_in_turn(tmp_path: Path) -> None:
    codec = TextCodec.load(str(MODEL_PATH))
    prompt = codec.encode_prompt("import os\nimport sys\n\ndef walk(")
    with CacheManager(CacheConfig(directory=tmp_path), codec.fingerprint) as caches:
        output = engine_outputs(caches, prompt)
    assert len(output) == 40

    proposer = SuffixProposer(vllm_config(cache_dir=str(tmp_path)))
    batch = VllmBatch()
    batch.add("a", Scripted(prompt, output, len(output)))
    batch.step(proposer)
    assert batch.drafts["a"] == output[1:9], "from what the engine wrote"
    batch.add("b", scripted(40))
    batch.step(proposer)
    told = batch.requests["b"].text
    proposer.close()

    with CacheManager(CacheConfig(directory=tmp_path), codec.fingerprint) as caches:
        assert told in stored(caches)


def test_a_redis_log_is_shared_with_our_server(redis_server: RedisServer) -> None:
    codec = TextCodec.load(str(MODEL_PATH))
    ours, theirs = scripted(50, max_tokens=40), scripted(51, max_tokens=5)
    with (
        ReplicationLog(redis_server.url, fingerprint=codec.fingerprint, vocab_size=codec.vocab_size) as log,
        CacheManager(CacheConfig(), codec.fingerprint, on_open=log.attach) as caches,
    ):
        proposer = SuffixProposer(vllm_config(redis_url=redis_server.url))
        core = proposer._core
        assert core is not None
        caches.get().append(ours.prompt + ours.output, prompt_length=len(ours.prompt))
        wait_until(lambda: core.cache.snapshot().num_tokens > 0)
        batch = VllmBatch()
        batch.add("a", ours)
        batch.step(proposer)
        assert batch.drafts["a"] == ours.output[1:9]
        batch.add("b", theirs)
        while not batch.finished():
            batch.step(proposer)
        before = caches.get().snapshot().num_tokens
        proposer.close()
        wait_until(lambda: caches.get().snapshot().num_tokens > before)


# vLLM itself


@pytest.mark.skipif(not (VLLM / ".ready").exists(), reason="vLLM is not installed: run `make bench-vllm`")
@pytest.mark.parametrize("runner", ["v1", "v2"])
def test_inside_vllm_the_outputs_are_those_without(runner: str) -> None:
    done = subprocess.run(
        [VLLM / "bin" / "python", "-m", "benchmarks.vllm.engines", "check", runner],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]


def test_the_counters_are_metrics_of_the_process(proposer: SuffixProposer) -> None:
    from prometheus_client import REGISTRY

    def value(name: str) -> float:
        return REGISTRY.get_sample_value(f"ssd:{name}") or 0.0

    names = ("drafts_requested_total", "drafts_total", "draft_tokens_total", "stored_requests_total")
    before = {name: value(name) for name in names}
    for attempt in range(2):
        batch = VllmBatch()
        batch.add(f"{attempt}", scripted(7))
        while not batch.finished():
            batch.step(proposer)
        proposer.on_finished(batch.runner, finishing([f"{attempt}"]))
    stats = proposer.stats()
    counted = {name: value(name) - before[name] for name in names}
    assert counted == dict(
        zip(names, (stats.num_proposals, stats.num_drafts, stats.num_draft_tokens, stats.num_stored), strict=True)
    )
    assert stats.num_stored == 2 and stats.num_draft_tokens > 0
    assert value("cached_tokens") == stats.num_cached_tokens > 0
