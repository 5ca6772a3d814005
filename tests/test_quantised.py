"""Quantised checkpoints load as they are, and speculation changes no token of what they say."""

from __future__ import annotations

import json
import shutil
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from benchmarks.exactness import Report, Setting, compare, reference_greedy
from benchmarks.workloads import snippets
from ssd.bundled import MODEL_PATH
from ssd.config import SamplingParams
from ssd.errors import ModelError
from ssd.model.loading.load_target import load_model, open_target
from ssd.model.ways.slot_target import SlotTarget
from ssd.text.codec import TextCodec

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
    assert isinstance(target, SlotTarget)
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
