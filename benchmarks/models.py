"""Which model a benchmark runs on: the arguments that say so, where the real one of ``make real-model`` lies, and
shapes of large models with random weights, for the time of steps only."""

from __future__ import annotations

import argparse
import json
import math
import os
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from benchmarks.child import ROOT
from ssd.bundled import MODEL_PATH

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

    from ssd.text.codec import TextCodec

REAL = "real"

VARIABLE = "SSD_REAL_MODEL"
MARKER = "real-model.json"
"""Lies in the directory once it is whole, and names the model."""


SHAPES: Final[dict[str, dict[str, Any]]] = {
    "tiny": {
        "vocab_size": 8192,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 4096,
    },
    "1b": {
        "vocab_size": 128_256,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131_072,
        "tie_word_embeddings": True,
    },
    "8b": {
        "vocab_size": 128_256,
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131_072,
    },
}
"""The larger ones are cut as Llama 3.2 1B and Llama 3.1 8B: steps take what theirs take; what they say means nothing.
The tiny one is for a look at the scripts. All have the ids of the bundled tokenizer."""

_LOUD = 1000.0
"""Times that the embedding of a model that speaks is larger: a standard deviation of 20, beside some 8 that 32 layers
of random weights add.
"""


def add_model(parser: argparse.ArgumentParser, others: Collection[str] = ()) -> None:
    """Let ``parser`` take the model as its first argument or as ``--model``: a directory, an id, or "real".

    Also ``--shape``, ``--dtype`` and ``--device``, but for those among ``others``, which the program adds itself.
    """
    text = f"Hugging Face directory or id, or {REAL!r} for what `make real-model` made (default: bundled)"
    # The positional one has no default of its own, which would take the place of what --model said.
    parser.add_argument("model", nargs="?", type=find_model, default=argparse.SUPPRESS, help=text)
    parser.add_argument("--model", dest="model", type=find_model, default=MODEL_PATH, help="the same, named")
    for name, more in (
        ("shape", {"choices": tuple(SHAPES), "help": "random weights of a Llama of this shape, no model"}),
        ("dtype", {"default": "auto", "help": "auto, float32, bfloat16 or float16 (default: auto)"}),
        ("device", {"default": "auto", "help": "auto, cpu or cuda (default: auto)"}),
    ):
        if name not in others:
            parser.add_argument(f"--{name}", **more)


def load(args: argparse.Namespace, *, speaks: bool = False) -> tuple[TextCodec, PreTrainedModel]:
    """The codec and the model that `add_model`'s arguments name; beside random weights the bundled codec."""
    from ssd.model.loading.load_target import load_model
    from ssd.text.codec import TextCodec

    if getattr(args, "shape", None):
        model = random_model(args.shape, dtype=args.dtype, device=args.device, speaks=speaks)
        return TextCodec.load(str(MODEL_PATH)), model
    return TextCodec.load(str(args.model)), load_model(args.model, dtype=args.dtype, device=args.device)


def settle(model: PreTrainedModel) -> None:
    """Have this thread's passes use as many threads as the product would: once a process, before engines are opened."""
    from ssd.model.loading.load_target import open_target
    from ssd.model.loading.threads import is_small, tune_threads

    if is_small(model):
        tune_threads(open_target(model, num_slots=1, max_length=128, batch_invariant="off"))


def random_model(shape: str, *, dtype: str, device: str, seed: int = 0, speaks: bool = False) -> PreTrainedModel:
    """A model of ``SHAPES[shape]`` whose weights are normal, made where they stay.

    speaks : whether each token clearly says which comes next. Scores of random weights lie so near to each other that
    passes of different width choose differently in bfloat16, and drafts of what was said before are rejected. Every
    token is followed by another one, so that text does not repeat itself; where input and output share their embedding
    it is followed by itself.
    """
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig

    from ssd.model.loading.load_target import DTYPES

    torch.manual_seed(seed)
    place = torch.device(("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device)
    kind = DTYPES["bfloat16" if place.type == "cuda" else "float32"] if dtype == "auto" else DTYPES[dtype]
    before = torch.get_default_dtype()
    torch.set_default_dtype(kind)
    try:
        with place:
            model: PreTrainedModel = AutoModelForCausalLM.from_config(LlamaConfig(**SHAPES[shape]), dtype=kind)
    finally:
        torch.set_default_dtype(before)
    if speaks:
        _speak(model)
    return model.eval()


def _speak(model: PreTrainedModel) -> None:
    import torch

    embedding, output = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    with torch.no_grad():
        if output is not embedding:
            size = len(output)
            place = torch.arange(size, device=output.device)
            # One cycle through the whole vocabulary: a step that has no factor in common with its size.
            step = next(step for step in range(int(size * 0.618), size) if math.gcd(step, size) == 1)
            output[(place + step) % size] = embedding[place]
        embedding *= _LOUD


def model_name(asked: argparse.Namespace | str | Path) -> str:
    """What a model is called in results; no path."""
    if isinstance(asked, argparse.Namespace):
        shape = getattr(asked, "shape", None)
        return f"random weights, shape {shape}" if shape else model_name(asked.model)
    return "bundled model" if Path(asked) == MODEL_PATH else name_of(Path(asked)) or Path(asked).name


def device_name(device: torch.device) -> str:
    """What a device is called in results."""
    import torch

    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def find_model(name: str) -> str | Path:
    """What ``name`` stands for. Raises ArgumentTypeError where "real" was asked for and is not there."""
    if name == "bundled":
        return MODEL_PATH
    if name != REAL:
        return name
    directory = default_directory()
    if not (directory / MARKER).is_file():
        raise argparse.ArgumentTypeError(
            f"no real model in {directory}; `make real-model` makes one, {VARIABLE} says where it is"
        )
    return directory


def default_directory() -> Path:
    """``$SSD_REAL_MODEL``, or ``.real-model`` in the checkout."""
    named = os.environ.get(VARIABLE)
    return Path(named) if named else ROOT / ".real-model"


def name_of(directory: Path) -> str | None:
    """What results call the real model in ``directory``; None where another model lies there."""
    marker = directory / MARKER
    return str(json.loads(marker.read_text())["name"]) if marker.is_file() else None
