"""Published heads in the engine: what they draft is what their slow twins say next, and no token changes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from benchmarks.exactness import Report, Setting, compare, run
from ssd.config import SamplingParams
from ssd.drafting.protocol import DraftRequest
from ssd.model.heads.drafter import HeadDrafter, tapped_by
from ssd.model.heads.layouts import load_head
from ssd.model.loading.load_target import open_target
from ssd.model.target import Target
from tests import published_heads as published
from tests.models import VOCAB, tiny_model
from tests.published_heads import HIDDEN
from tests.reference import head_layouts as slow

Twin = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Logits [V] after a text, int64[n], with the target's hidden states of all but its last token, [n - 1, H]."""


@dataclass(frozen=True, slots=True)
class Published:
    directory: Path
    architecture: str
    twin: Twin


def mtp(scratch: Path, name: str, prefix: str, parts: dict[str, str], layer: str) -> Published:
    owner, tensors = published.one_layer(name, scratch / "owner")
    own = published.mtp_parts()
    named = {f"{prefix}{parts[key]}.weight": tensor for key, tensor in own.items()}
    config = {"hidden_size": HIDDEN, "vocab_size": VOCAB, "num_nextn_predict_layers": 1}
    target = tiny_model(name)

    def twin(text: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        embedded = target.get_input_embeddings()(text[1:])
        after, _ = slow.mtp(owner, 2, own, embedded[None], hidden[None], hidden_first=False, one_more=False)
        return after[0, -1] @ target.get_output_embeddings().weight.T

    tensors = named | {layer + key: tensor for key, tensor in tensors.items()}
    return Published(published.write(scratch / "head", config, tensors), name, twin)


def deepseek(scratch: Path) -> Published:
    parts = {"embedding": "enorm", "hidden": "hnorm", "project": "eh_proj", "norm": "shared_head.norm"}
    return mtp(scratch, "DeepSeek-V3 (latent attention)", "model.layers.2.", parts, "model.layers.2.")


def qwen(scratch: Path) -> Published:
    parts = {"embedding": "pre_fc_norm_embedding", "hidden": "pre_fc_norm_hidden", "project": "fc", "norm": "norm"}
    return mtp(scratch, "Qwen3-MoE", "mtp.", parts, "mtp.layers.0.")


def eagle(scratch: Path) -> Published:
    tensors, target = published.eagle(), tiny_model()

    def twin(text: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        after = slow.eagle(tensors, published.EAGLE_SHAPE, target.get_input_embeddings()(text[1:]), hidden)
        return after[-1] @ target.get_output_embeddings().weight.T

    return Published(published.write(scratch, published.EAGLE_SHAPE, tensors), "Llama", twin)


def medusa(scratch: Path) -> Published:
    blocks, outputs = published.medusa(3, 1)
    tensors = {name.replace(".0.", ".0.linear."): tensor for name, tensor in blocks.items()}
    tensors |= {f"{index}.1.weight": output for index, output in enumerate(outputs)}

    def twin(text: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        first = [[(blocks["0.0.weight"], blocks["0.0.bias"])]]
        return slow.medusa(first, outputs[:1], hidden[-1])[0]

    return Published(published.write(scratch, {"medusa_num_heads": 3}, tensors), "Llama", twin)


HEADS: dict[str, Callable[[Path], Published]] = {
    "DeepSeek-V3": deepseek, "Qwen's names": qwen, "EAGLE": eagle, "Medusa": medusa
}  # fmt: skip


def open_with(head: Published) -> tuple[Target, HeadDrafter]:
    model = tiny_model(head.architecture)
    loaded = load_head(head.directory, model)
    tapped = tapped_by(loaded, model.device, model.dtype)
    target = open_target(model, num_slots=4, max_length=64, tapped=tapped, exact="on")
    return target, HeadDrafter(loaded, target)


def hidden_states(model: PreTrainedModel, text: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = model.get_decoder()(text[None]).last_hidden_state[0]
    return found


@pytest.mark.parametrize("name", HEADS)
@torch.inference_mode()
def test_the_first_drafted_token_is_what_the_twin_says_next(name: str, tmp_path: Path) -> None:
    head = HEADS[name](tmp_path)
    target, drafter = open_with(head)
    plain = tiny_model(head.architecture)
    text = np.random.default_rng(5).integers(3, VOCAB, 30)
    fed = 0
    for length in (9, 10, 14, 30):
        part = text[fed : length - 1]
        target.forward([1], part[None], [len(part)])
        fed = length - 1
        tokens = torch.from_numpy(text[:length])
        logits = head.twin(tokens, hidden_states(plain, tokens[:-1]))
        request = DraftRequest("a", text[:length].astype(np.int32), 1, None, 3, prices=np.zeros(1), slot=1)
        (draft,) = drafter.propose([request])
        chances = torch.softmax(logits, -1)
        assert draft.token_ids[0] == int(logits.argmax())
        assert draft.probabilities is not None
        assert draft.probabilities[0] == pytest.approx(float(chances.max()), rel=1e-3)


@pytest.mark.parametrize("name", HEADS)
def test_a_head_changes_no_token(name: str, tmp_path: Path) -> None:
    target, _drafter = open_with(head := HEADS[name](tmp_path))
    random = np.random.default_rng(1)
    asked = [random.integers(3, VOCAB, 4 + 3 * index).tolist() for index in range(6)]
    for sampling in (
        [SamplingParams(max_tokens=12, temperature=0.0)] * len(asked),
        [SamplingParams(max_tokens=12, temperature=0.9, seed=seed) for seed in range(len(asked))],
        [SamplingParams(max_tokens=12, temperature=0.9)] * len(asked),  # coupled
    ):
        expected, _ = run(target, asked, sampling, None, eos_token_ids=[2])
        report = Report()
        for setting in (Setting("head", 3, 1), Setting("head", 4, 4)):
            makers = {"head": lambda: HeadDrafter(load_head(head.directory, target.model), target)}
            compare(target, asked, sampling, expected, setting, eos_token_ids=[2], report=report, makers=makers)
        assert report.passed, report.mismatches[:5]
