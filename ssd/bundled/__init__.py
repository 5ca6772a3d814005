"""The small language model that ships with the project, and a draft head for it: everything runs without a model hub.

``MODEL_PATH`` is an ordinary Hugging Face model directory: ``AutoModelForCausalLM.from_pretrained(MODEL_PATH)``.
What it can and cannot do, and how it was made, is in ``model/MODEL_CARD.md``. Importing this package loads no torch.
"""

from __future__ import annotations

from pathlib import Path

MODEL_PATH: Path = Path(__file__).resolve().parent / "model"
"""Directory of the bundled model: weights, tokenizer, chat template, model card."""

HEAD_PATH: Path = Path(__file__).resolve().parent / "head"
"""Directory of an EAGLE-3 head for it, in the layout of the EAGLE repository, and of the log of its training."""

__all__ = ["HEAD_PATH", "MODEL_PATH"]
