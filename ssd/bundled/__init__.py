"""The small language model that ships with the project, and a draft head for it, so that everything runs without a hub.

``MODEL_PATH`` is an ordinary Hugging Face model directory: ``AutoModelForCausalLM.from_pretrained(MODEL_PATH)``.
``benchmarks/training`` of a checkout, which is not installed, contains the training; ``model/MODEL_CARD.md`` describes
the model's abilities and limits. Importing this package loads no torch.
"""

from __future__ import annotations

from pathlib import Path

MODEL_PATH: Path = Path(__file__).resolve().parent / "model"
"""The directory of the bundled model: weights, tokenizer, chat template, model card."""

HEAD_PATH: Path = Path(__file__).resolve().parent / "head"
"""The directory of an EAGLE-3 head for the bundled model, in the layout of the EAGLE repository, with its training log.
"""

__all__ = ["HEAD_PATH", "MODEL_PATH"]
