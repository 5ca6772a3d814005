"""Directories that hold no head of this model: one line says what is wrong, whatever is in them."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from ssd.errors import ModelError
from ssd.model.draft.drafter import feature_spec
from ssd.model.heads.layouts import load_head, run_head
from ssd.model.heads.networks import FusedHead
from ssd.model.loading.load_target import load_model, open_target
from tests import published_heads as published
from tests.models import VOCAB, tiny_model
from tests.published_heads import HIDDEN, random

Contents = tuple[dict[str, Any], dict[str, torch.Tensor]]


@cache
def target() -> PreTrainedModel:
    return tiny_model()


@cache
def deep() -> PreTrainedModel:
    return tiny_model("Llama", num_hidden_layers=8)


def eagle() -> Contents:
    return dict(published.EAGLE_SHAPE), published.eagle()


def medusa() -> Contents:
    return {"medusa_num_heads": 2, "hidden_size": HIDDEN, "vocab_size": VOCAB}, published.medusa(2, 1)


def mtp() -> Contents:
    """DeepSeek's names, with a layer of the Llama beside it."""
    parts = {"embedding": "enorm", "hidden": "hnorm", "project": "eh_proj", "norm": "shared_head.norm"}
    tensors = {f"{parts[name]}.weight": tensor for name, tensor in published.mtp_parts().items()}
    layer = {name: tensor.detach() for name, tensor in target().get_decoder().layers[1].state_dict().items()}
    return (
        {"hidden_size": HIDDEN, "vocab_size": VOCAB, "num_hidden_layers": 2, "num_nextn_predict_layers": 1},
        {f"model.layers.2.{name}": tensor for name, tensor in {**tensors, **layer}.items()},
    )


KINDS: dict[str, Callable[[], Contents]] = {"eagle": eagle, "medusa": medusa, "mtp": mtp}


@pytest.mark.parametrize("kind", KINDS)
def test_heads_are_in_the_dtype_of_the_target(kind: str, tmp_path: Path) -> None:
    model = tiny_model().to(torch.bfloat16)
    head = load_head(published.write(tmp_path, *KINDS[kind]()), model)
    assert {tensor.dtype for tensor in run_head(head, model)} == {torch.bfloat16}


ANOTHER = "the head was made for another model: its config.json says {} {}, but this model has"
EXPECTED = r"tensor {} has the shape \({}, {}\), expected"
Change = Callable[[dict[str, Any], dict[str, torch.Tensor]], object]


def says(field: str, value: int) -> Change:
    return lambda config, _tensors: config.update({field: value})


def has(name: str, *shape: int) -> Change:
    return lambda _config, tensors: tensors.update({name: random(*shape, seed=0)})


def lacks(name: str) -> Change:
    return lambda _config, tensors: tensors.pop(name)


REFUSED: list[tuple[str, Change, str]] = [
    ("eagle", says("hidden_size", 128), ANOTHER.format("hidden_size", 128)),
    ("medusa", says("vocab_size", 32000), ANOTHER.format("vocab_size", 32000)),
    ("mtp", says("num_hidden_layers", 61), ANOTHER.format("num_hidden_layers", 61)),
    ("eagle", has("fc.weight", 64, 256), EXPECTED.format("fc.weight", 64, 256)),
    ("eagle", has("layers.0.mlp.up_proj.weight", 64, 64), EXPECTED.format("layers.0.mlp.up_proj.weight", 64, 64)),
    ("medusa", has("1.1.weight", 32000, 64), EXPECTED.format("1.1.weight", 32000, 64)),
    ("mtp", has("model.layers.2.eh_proj.weight", 128, 256), "eh_proj.weight has the shape"),
    *(
        (kind, lacks(name), rf"lacks 1 of its tensors \({name}\): ")
        for kind, name in (
            ("eagle", "layers.0.self_attn.o_proj.weight"),
            ("medusa", "1.0.linear.bias"),
            ("medusa", "0.1.weight"),
            ("mtp", "model.layers.2.enorm.weight"),
            ("mtp", "model.layers.2.mlp.down_proj.weight"),
        )
    ),
]


@pytest.mark.parametrize(("kind", "change", "message"), REFUSED)
def test_what_does_not_fit_is_named(kind: str, change: Change, message: str, tmp_path: Path) -> None:
    config, tensors = KINDS[kind]()
    change(config, tensors)
    with pytest.raises(ModelError, match=message):
        load_head(published.write(tmp_path, config, tensors), target())


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("config.json", None, "config.json .*cannot be read"),
        ("config.json", b"{", "config.json .*cannot be read"),
        ("config.json", b"[1]", "config.json .*not a JSON object"),
        ("model.safetensors", None, "has no weights"),
    ],
)
def test_a_directory_that_is_not_whole_is_refused(
    file: str, content: bytes | None, message: str, tmp_path: Path
) -> None:
    path = published.write(tmp_path, *eagle()) / file
    path.unlink() if content is None else path.write_bytes(content)
    with pytest.raises(ModelError, match=message):
        load_head(tmp_path, target())
    published.write(tmp_path, {}, {"some.thing": random(2, seed=0)})
    with pytest.raises(ModelError, match=r"none of the supported layouts.*Medusa.*MTP module.*1 tensors: some\.thing"):
        load_head(tmp_path, target())


EAGLE3_REFUSED: dict[str, tuple[Callable[[Path], Path], str]] = {
    "another vocabulary": (lambda path: published.eagle3(path, vocab_size=VOCAB + 1), "made for another model"),
    "another hidden size": (lambda path: published.eagle3(path, hidden_size=32), "embed_tokens"),
    "another target": (
        lambda path: published.eagle3(path, target_hidden_size=128),
        "target_hidden_size 128, but this model has 64",
    ),
    "more ids than entries": (lambda path: published.eagle3(path, draft_vocab_size=81), "d2t has 80 entries"),
    "no such layer": (lambda path: published.speculators(path, eagle_aux_hidden_state_layer_ids=[2, 4]), "fc.weight"),
    "odd layers": (
        lambda path: published.speculators(path, eagle_aux_hidden_state_layer_ids=["a"]),
        "not a list of layers",
    ),
    "no layer config": (
        lambda path: published.speculators(path, transformer_layer_config=None),
        "transformer_layer_config",
    ),
    "several layers": (lambda path: published.eagle3(path, num_hidden_layers=2), "several layers"),
    "normed before": (lambda path: published.speculators(path, norm_before_fc=True), "norm_before_fc"),
    "unread": (lambda path: published.speculators(path, {"gate.weight": torch.ones(3)}), r"tensors \(gate.weight\)"),
    "missing": (lambda path: published.eagle3(path, {"norm.weight": None}), "norm.weight"),
    "ids outside": (lambda path: published.eagle3(path, {"d2t": torch.full((80,), VOCAB)}), "outside 0..299"),
}


@pytest.mark.parametrize("case", EAGLE3_REFUSED)
def test_what_does_not_fit_of_eagle3_is_said_in_one_line(case: str, tmp_path: Path) -> None:
    make, message = EAGLE3_REFUSED[case]
    with pytest.raises(ModelError, match=message) as refused:
        load_head(make(tmp_path), deep())
    assert "\n" not in str(refused.value)


def test_layers_that_the_model_does_not_have_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="too few for the default choice"):
        load_head(published.eagle3(tmp_path), target())
    listed = {"eagle_aux_hidden_state_layer_ids": [1, 3, 8]}
    head = load_head(published.eagle3(tmp_path, eagle_config=listed), deep())
    with pytest.raises(ModelError, match="reads the output of layer 9, but LlamaForCausalLM has only 8 layers"):
        open_target(deep(), num_slots=2, max_length=32, tapped=feature_spec(head, deep().device, deep().dtype))


def test_a_module_lies_among_the_tensors_of_its_target(tmp_path: Path) -> None:
    """The directory of the target is that of its module."""
    target().save_pretrained(tmp_path)
    _config, tensors = mtp()
    whole = load_file(tmp_path / "model.safetensors")
    save_file(
        {**whole, **{name: tensor.contiguous() for name, tensor in tensors.items()}}, tmp_path / "model.safetensors"
    )
    model = load_model(tmp_path, dtype="float32", device="cpu")
    assert model.num_parameters() == target().num_parameters()
    assert isinstance(load_head(tmp_path, model), FusedHead)


def test_a_head_is_not_changed_with_its_files(tmp_path: Path) -> None:
    published.write(tmp_path, *medusa())
    head = load_head(tmp_path, target())
    wanted = run_head(head, target())
    with (tmp_path / "model.safetensors").open("r+b") as file:
        file.seek(5000)
        file.write(bytes(20000))
    assert all(map(torch.equal, run_head(head, target()), wanted))


class Mischief:
    """What is run when it is unpickled by who runs what is pickled."""

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str]]:
        return (exec, ("raise KeyboardInterrupt('it was run')",))


@pytest.mark.parametrize("wrap", ["torch", "pickle"])
def test_nothing_pickled_is_run(wrap: str, tmp_path: Path) -> None:
    (published.write(tmp_path, *medusa()) / "model.safetensors").unlink()
    path = tmp_path / "medusa_lm_head.pt"
    if wrap == "torch":
        torch.save({"0.0.linear.weight": Mischief()}, path)
    else:
        path.write_bytes(pickle.dumps({"0.0.linear.weight": Mischief()}))
    with pytest.raises(ModelError, match=r"medusa_lm_head\.pt cannot be read"):
        load_head(tmp_path, target())


@pytest.mark.parametrize("pickled", [False, True], ids=["safetensors", "pickled"])
@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
def test_damaged_weights_are_refused_or_read(
    kind: str, pickled: bool, data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    directory = tmp_path_factory.mktemp("head", numbered=True)
    path = published.write(directory, *KINDS[kind]()) / "model.safetensors"
    if pickled:
        tensors = load_file(path)
        path.unlink()
        path = directory / "pytorch_model.bin"
        torch.save(tensors, path)
    path.write_bytes(damaged(path.read_bytes(), data))
    load_or_refuse(directory)


def damaged(content: bytes, data: st.DataObject) -> bytes:
    """With some bytes changed, more of them near the beginning, and perhaps cut."""
    changed = bytearray(content)
    near = st.integers(0, min(2000, len(content) - 1))
    for place in data.draw(st.lists(near | st.integers(0, len(content) - 1), max_size=4)):
        changed[place] = data.draw(st.integers(0, 255))
    return bytes(changed[: data.draw(st.integers(0, len(content)) | st.just(len(content)))])


VALUES = (
    st.none()
    | st.booleans()
    | st.integers(-2, 1 << 40)
    | st.floats()
    | st.text(max_size=5)
    | st.lists(st.integers(), max_size=2)
    | st.dictionaries(st.sampled_from(["rope_type", "factor"]), st.text(max_size=4))
)


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
def test_odd_configurations_are_refused_or_read(
    kind: str, data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    config, tensors = KINDS[kind]()
    fields = sorted(
        {*config, "head_dim", "rope_scaling", "rope_parameters", "attention_bias", "transformer_layer_config"}
    )
    for field in data.draw(st.lists(st.sampled_from(fields), min_size=1, max_size=3)):
        config[field] = data.draw(VALUES)
    load_or_refuse(published.write(tmp_path_factory.mktemp("head", numbered=True), config, tensors))


def load_or_refuse(directory: Path) -> None:
    try:
        load_head(directory, target())
    except ModelError as error:
        assert len(str(error).splitlines()) == 1
