"""The models that benchmarks run on: options that choose one, the model of ``make real-model``, and random weights.

Models of large shapes with random weights serve to time steps; their output is meaningless.
"""

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
"""The file with the model's name. It is written last, so that it marks a complete directory."""


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
"""The shapes of models with random weights. "1b" and "8b" are those of Llama 3.2 1B and Llama 3.1 8B, so steps take as
long as theirs, but the output is meaningless. "tiny" is for trying the scripts. All contain the token ids of the
bundled tokenizer."""

_LOUD = 1000.0
"""The factor by which embeddings are scaled in a model whose next token is certain (``speaks``). It gives them a
standard deviation of 20, which outweighs the 8 or so that 32 layers of random weights add."""


def add_model(parser: argparse.ArgumentParser, others: Collection[str] = ()) -> None:
    """Add options to ``parser`` for the model: its first argument or ``--model``, each a directory, an id, or "real".

    Also adds ``--shape``, ``--dtype`` and ``--device``, except those in ``others``, which the program adds itself.
    """
    text = f"Hugging Face directory or id, or {REAL!r} for the model of `make real-model` (default: bundled model)"
    # The positional one has no default of its own, which would take the place of what --model said.
    parser.add_argument("model", nargs="?", type=find_model, default=argparse.SUPPRESS, help=text)
    parser.add_argument("--model", dest="model", type=find_model, default=MODEL_PATH, help="the model as an option")
    for name, more in (
        ("shape", {"choices": tuple(SHAPES), "help": "use a Llama model of this shape with random weights"}),
        (
            "dtype",
            {"default": "auto", "help": "dtype of the weights: auto, float32, bfloat16 or float16 (default: auto)"},
        ),
        ("device", {"default": "auto", "help": "device to run on: auto, cpu or cuda (default: auto)"}),
    ):
        if name not in others:
            parser.add_argument(f"--{name}", **more)


def load(args: argparse.Namespace, *, speaks: bool = False) -> tuple[TextCodec, PreTrainedModel]:
    """Load the model of `add_model`'s options and its tokenizer, for random weights the bundled tokenizer."""
    from ssd.model.loading.load_target import load_model
    from ssd.text.codec import TextCodec

    if getattr(args, "shape", None):
        model = random_model(args.shape, dtype=args.dtype, device=args.device, speaks=speaks)
        return TextCodec.load(str(MODEL_PATH)), model
    return TextCodec.load(str(args.model)), load_model(args.model, dtype=args.dtype, device=args.device)


def settle(model: PreTrainedModel) -> None:
    """Set the number of threads for forward passes as the product does. Call once, before opening engines."""
    from ssd.model.loading.load_target import open_target
    from ssd.model.loading.threads import is_small, tune_threads

    if is_small(model):
        tune_threads(open_target(model, num_slots=1, max_length=128, batch_invariant="off"))


def random_model(shape: str, *, dtype: str, device: str, seed: int = 0, speaks: bool = False) -> PreTrainedModel:
    """Create a model of ``SHAPES[shape]`` with normally distributed random weights, directly on its device.

    Args:
        shape: The name of the shape.
        dtype: The name of the dtype; "auto" is bfloat16 on a GPU and float32 on a CPU.
        device: The name of the device, or "auto".
        seed: The seed of the weights.
        speaks: Whether each token clearly determines the next one. The scores of random weights are so similar that
            passes of different width would choose different tokens in bfloat16, and correct drafts would be rejected.
            Each token is followed by another token, so that text does not repeat; with tied embeddings, it is followed
            by itself.
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
    """Return the name of a model in results, without its path."""
    if isinstance(asked, argparse.Namespace):
        shape = getattr(asked, "shape", None)
        return f"random weights, shape {shape}" if shape else model_name(asked.model)
    return "bundled model" if Path(asked) == MODEL_PATH else name_of(Path(asked)) or Path(asked).name


def device_name(device: torch.device) -> str:
    """Return the name of a device in results."""
    import torch

    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def find_model(name: str) -> str | Path:
    """Return the directory or id that ``name`` stands for. Raises ArgumentTypeError if there is no model for "real"."""
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
    """Return the directory of the real model: ``$SSD_REAL_MODEL``, or ``.real-model`` in the checkout."""
    named = os.environ.get(VARIABLE)
    return Path(named) if named else ROOT / ".real-model"


def name_of(directory: Path) -> str | None:
    """Return the name of the real model in ``directory``; None if the directory holds another model."""
    marker = directory / MARKER
    return str(json.loads(marker.read_text())["name"]) if marker.is_file() else None
