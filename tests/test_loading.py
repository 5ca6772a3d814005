"""A checkpoint is served with all its weights or not at all; how much memory may be in use."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from benchmarks.exactness import Report, Setting, compare, reference_greedy
from benchmarks.workloads import snippets
from ssd.bundled import MODEL_PATH
from ssd.config import EngineConfig, SamplingParams
from ssd.engine import Engine
from ssd.errors import ModelError
from ssd.model.loading import memory as kv_budget
from ssd.model.loading import threads
from ssd.model.loading.load_target import load_model, open_target
from ssd.model.loading.memory import ControlGroup, fit_slots, free_bytes, tightest_group, total_bytes, usable_bytes
from ssd.model.loading.threads import tune_threads
from ssd.model.runners.slot_runner import SlotRunner
from ssd.model.target import Target
from ssd.text.codec import TextCodec
from tests.models import tiny_model

CPU = torch.device("cpu")


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    tiny_model("Llama", num_hidden_layers=2).save_pretrained(tmp_path)
    return tmp_path


def change(checkpoint: Path, **settings: Any) -> None:
    path = checkpoint / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **settings}))


@pytest.mark.parametrize("kind", ["magic", "su"])
def test_an_unknown_kind_of_rope_is_named(checkpoint: Path, kind: str, caplog: pytest.LogCaptureFixture) -> None:
    change(checkpoint, rope_parameters=None, rope_scaling={"type": kind, "factor": 2.0})
    with pytest.raises(ModelError, match=rf"rope_scaling of the type '{kind}', .* it has default, .*yarn"):
        load_model(checkpoint, device="cpu")
    assert not caplog.records


def test_weights_in_float8_without_a_scale_are_named(checkpoint: Path) -> None:
    change(checkpoint, dtype="float8_e4m3fn")
    with pytest.raises(ModelError, match=r"declares torch\.float8_e4m3fn weights, but lacks a quantization_config"):
        load_model(checkpoint, device="cpu")


def test_a_tokenizer_of_another_model_and_one_without_an_end_are_warned_about(
    checkpoint: Path, caplog: pytest.LogCaptureFixture
) -> None:
    own = load_model(checkpoint, device="cpu").config.vocab_size
    codec = TextCodec.load(str(MODEL_PATH))
    for size, ids, warning in (
        (own + 1, (0,), f"has {own + 1} token ids, but the model has only {own}"),
        (own, (), "no end-of-text token is known"),
    ):
        caplog.clear()
        codec.vocab_size, codec.eos_token_ids = size, ids
        Engine.from_pretrained(checkpoint, device="cpu", codec=codec, config=EngineConfig(max_num_seqs=1))
        (record,) = (record for record in caplog.records if record.levelno == logging.WARNING)
        assert warning in record.getMessage()


@pytest.mark.parametrize("tied", [True, False])
def test_tied_weights_are_not_missing_and_others_are(tied: bool, tmp_path: Path) -> None:
    tiny_model("Llama", tie_word_embeddings=tied).save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    assert ("lm_head.weight" in load_file(path)) is not tied
    load_model(tmp_path, device="cpu")
    change(tmp_path, tie_word_embeddings=not tied)
    if tied:
        with pytest.raises(ModelError, match=r"lacks 1 of the weights .* lm_head\.weight: "):
            load_model(tmp_path, device="cpu")


def test_weights_of_another_shape_are_refused(checkpoint: Path) -> None:
    change(checkpoint, intermediate_size=40)
    with pytest.raises(
        ModelError, match=r"weights have other shapes than its config\.json says, e\.g\. model\.layers\.0\.mlp"
    ):
        load_model(checkpoint, device="cpu")


def test_weights_without_a_place_are_warned_of(checkpoint: Path, caplog: pytest.LogCaptureFixture) -> None:
    change(checkpoint, num_hidden_layers=1)
    load_model(checkpoint, device="cpu")
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert "does not use 9 weights" in caplog.text and "model.layers.1." in caplog.text


def test_a_file_cut_short_is_an_error_of_one_line(checkpoint: Path) -> None:
    path = checkpoint / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ModelError, match="cannot load model"):
        load_model(checkpoint, device="cpu")


def test_a_share_of_all_memory_counts_what_is_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    assert 0 < free_bytes(CPU) <= total_bytes(CPU)
    monkeypatch.setattr(kv_budget, "total_bytes", lambda _device: 1000)
    monkeypatch.setattr(kv_budget, "free_bytes", lambda _device: 700)
    assert [usable_bytes(CPU), usable_bytes(CPU, 0.9), usable_bytes(CPU, 1.0)] == [350, 600, 700]
    for too_low in (0.1, 0.3):
        with pytest.raises(ModelError, match="--gpu-memory-utilization"):
            usable_bytes(CPU, too_low)


# -- how many slots fit ----------------------------------------------------------------------------------------------


def fit(
    num_slots: int, max_length: int | None, limit: int, usable: int, *, extra: int = 0, size: int = 1
) -> list[object]:
    found = fit_slots(
        num_slots=num_slots,
        max_length=max_length,
        limit=limit,
        extra=extra,
        bytes_per_token=size,
        usable_bytes=usable,
    )
    return [found.num_slots, found.max_length, found.shortage is None]


def test_a_length_nobody_asked_for_gets_shorter_before_slots_get_fewer() -> None:
    assert fit(4, None, 8000, 20_000) == [4, 5000, False]
    assert fit(4, None, 8000, 8000) == [3, 2048, False]
    assert fit(4, None, 1000, 2000) == [2, 1000, False]


def test_not_even_one_slot_is_an_error_that_says_what_to_lower() -> None:
    with pytest.raises(ModelError, match="Lower --max-model-len to at most 400"):
        fit(4, 1000, 5000, 500, extra=100)
    with pytest.raises(ModelError, match="Free memory"):
        fit(4, None, 5000, 0)


@given(
    num_slots=st.integers(1, 64),
    max_length=st.none() | st.integers(2, 10_000),
    limit=st.integers(2, 10_000),
    extra=st.integers(0, 65),
    size=st.integers(1, 500),
    usable=st.integers(0, 1 << 30),
)
def test_what_is_granted_never_exceeds_the_share_and_one_more_slot_would(
    num_slots: int, max_length: int | None, limit: int, extra: int, size: int, usable: int
) -> None:
    try:
        slots, length, whole = fit(num_slots, max_length, limit, usable, extra=extra, size=size)
    except ModelError:
        smallest = max_length or min(limit, 2048)
        assert (smallest + extra) * size > usable - size
        return
    assert isinstance(slots, int) and isinstance(length, int)
    needed = (length + extra) * size
    assert 1 <= slots <= num_slots and slots * needed <= usable
    assert length == max_length if max_length else length <= limit
    if whole:
        assert (slots, length) == (num_slots, max_length or limit)
    else:
        assert slots == num_slots or (slots + 1) * needed > usable - size


def group(directory: Path, **files: str) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (directory / name.replace("__", ".")).write_text(content)


def test_the_tightest_control_group_counts_and_cached_files_are_free(tmp_path: Path) -> None:
    membership = tmp_path / "cgroup"
    membership.write_text("0::/outer/inner\n")
    mount = tmp_path / "fs"
    group(mount / "outer", memory__max="1000\n", memory__current="700\n", memory__stat="anon 1\ninactive_file 50\n")
    group(mount / "outer" / "inner", memory__max="max\n", memory__current="600\n")
    assert tightest_group(mount, membership) == ControlGroup(1000, 350)
    group(mount / "outer" / "inner", memory__max="800\n", memory__current="600\n")
    assert tightest_group(mount, membership) == ControlGroup(800, 200)
    membership.write_text("3:cpuset:/\n0::/the/hosts/path\n")  # which is not mounted here
    group(mount, memory__max="500", memory__current="100")
    assert tightest_group(mount, membership) == ControlGroup(500, 400)


def test_no_limit_and_no_control_groups_at_all(tmp_path: Path) -> None:
    membership = tmp_path / "cgroup"
    assert tightest_group(tmp_path, membership) is None
    membership.write_text("0::/\n")
    group(tmp_path, memory__max="max\n", memory__current="600\n")
    assert tightest_group(tmp_path, membership) is None


def test_more_slots_than_there_is_memory_for_run_as_fewer(caplog: pytest.LogCaptureFixture) -> None:
    """A thousand million slots of the tiny model; nothing is allocated for those that are not granted."""
    with caplog.at_level("WARNING"):
        target = open_target(
            tiny_model(), num_slots=10**9, max_length=100, max_draft_tokens=3, kv_cache_memory_bytes=1 << 19
        )
    # Two layers, keys and values of two heads of 16 floats: 512 bytes a token, 104 tokens a slot.
    assert target.num_slots == (1 << 19) // (512 * 104)
    assert "lower --max-model-len" in caplog.text


# -- threads of a CPU ------------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def as_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    yield
    torch.set_num_threads(before)


def tiny_target(name: str = "Llama") -> Target:
    return open_target(tiny_model(name), num_slots=1, max_length=40)


def pretend(monkeypatch: pytest.MonkeyPatch, seconds: dict[int, float]) -> list[int]:
    """Passes take what ``seconds`` says of the threads in use; returns the threads that were tried."""
    tried: list[int] = []

    def timed(_target: Target, width: int) -> float:
        tried.append(torch.get_num_threads())
        return seconds[tried[-1]] * width

    monkeypatch.setattr(threads, "_time_pass", timed)
    return tried


@pytest.mark.parametrize("best", [1, 2, 4])
def test_the_fastest_is_used(monkeypatch: pytest.MonkeyPatch, best: int) -> None:
    tried = pretend(monkeypatch, {count: 0.002 if count == best else 0.003 for count in (1, 2, 4)})
    assert tune_threads(tiny_target()) == best == torch.get_num_threads()
    assert set(tried) == {1, 2, 4}


def test_a_small_model_is_opened_by_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    used: set[int] = set()
    model = tiny_model()
    model.register_forward_pre_hook(lambda *_: used.add(torch.get_num_threads()))
    open_target(model, num_slots=1, max_length=40)
    assert used == {1} and torch.get_num_threads() == 4


def test_the_environment_has_the_last_word(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = pretend(monkeypatch, {})
    monkeypatch.setenv("OMP_NUM_THREADS", "4")
    assert tune_threads(tiny_target()) == 4 and tried == []


# Quantised checkpoints


MAX_TOKENS = 16
HAS_TORCHAO = find_spec("torchao") is not None

# torchao tells of kernels that it was not built with.
pytestmark = pytest.mark.filterwarnings("default")


def quantisation(kind: str) -> Any:
    from torchao.quantization import Int8WeightOnlyConfig, IntxWeightOnlyConfig
    from transformers import TorchAoConfig

    weights = Int8WeightOnlyConfig() if kind == "int8" else IntxWeightOnlyConfig(weight_dtype=torch.int4)  # type: ignore[attr-defined]
    return TorchAoConfig(quant_type=weights)


@pytest.mark.skipif(not HAS_TORCHAO, reason="torchao is not installed: pip install '.[quantised]'")
@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_a_quantised_checkpoint_says_what_its_own_generate_says(kind: str, tmp_path: Path) -> None:
    """Weights only, saved and loaded again from the directory, without drafts and with them."""
    AutoModelForCausalLM.from_pretrained(
        str(MODEL_PATH), dtype=torch.float32, quantization_config=quantisation(kind)
    ).save_pretrained(tmp_path)
    model = load_model(tmp_path, device="cpu")
    assert type(model.model.layers[0].self_attn.q_proj.weight) is not torch.nn.Parameter
    target = open_target(model, num_slots=4, max_length=256)
    assert isinstance(target, SlotRunner)
    codec = TextCodec.load(str(MODEL_PATH))
    prompts = [codec.encode_prompt(text)[-64:] for text in snippets(1)[:4]]
    expected = reference_greedy(target, prompts, MAX_TOKENS, codec.eos_token_ids)
    sampling = [SamplingParams(max_tokens=MAX_TOKENS, temperature=0.0)] * len(prompts)
    report = Report()
    for setting in (Setting("none", 0, 1), Setting("oracle", 6, 4), Setting("random", 3, 2)):
        compare(target, prompts, sampling, expected, setting, eos_token_ids=codec.eos_token_ids, report=report)
    assert report.passed, (str(report), report.mismatches)
    assert report.acceptance["oracle/k6/b4"] > 2


@pytest.mark.skipif(HAS_TORCHAO, reason="torchao is installed")
def test_a_quantised_checkpoint_without_its_library_says_what_to_install(tmp_path: Path) -> None:
    for path in MODEL_PATH.iterdir():
        shutil.copy(path, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "torchao",
        "quant_type": {"default": {"_type": "Int8WeightOnlyConfig"}},
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match="torchao"):
        load_model(tmp_path, device="cpu")
