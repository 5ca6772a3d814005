"""A small language model with an EAGLE-3 draft head that ships with the project, so that it runs without downloads.

``MODEL_PATH`` is an ordinary Hugging Face model directory: ``AutoModelForCausalLM.from_pretrained(MODEL_PATH)``.
``model/MODEL_CARD.md`` describes the model's abilities and limits. The training code is in ``benchmarks/training`` of a
checkout and is not installed. Importing this package loads no torch.
"""

from __future__ import annotations

from pathlib import Path

MODEL_PATH: Path = Path(__file__).resolve().parent / "model"
"""The directory of the bundled model: weights, tokenizer, chat template and model card."""

HEAD_PATH: Path = Path(__file__).resolve().parent / "head"
"""The directory of an EAGLE-3 head for the bundled model, in the layout of the EAGLE repository, with its training log.
"""

__all__ = ["HEAD_PATH", "MODEL_PATH"]
