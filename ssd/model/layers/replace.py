"""Replacing layers of a model by faster ones that compute the same."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence

import torch
from transformers import PreTrainedModel

from ssd.errors import first_line
from ssd.model.layers.probe_logits import plain_logits
from ssd.model.layers.replaced import Replace

log = logging.getLogger(__name__)


def replace_layers(
    model: PreTrainedModel, kinds: Iterable[Replace], *, expected: Sequence[torch.Tensor], tolerance: float
) -> bool:
    """Replace layers of a model, and check that it still says what it said; else leave it as it was.

    ``expected`` : its `plain_logits`. ``tolerance`` : greatest relative error of them that is put down to rounding.
    True when layers were replaced. Changes ``model`` in place, and again does nothing. O(weights).
    """
    replaced = [each for replace in kinds for each in replace(model)]
    if not replaced:
        return False
    try:
        error = max(
            float((found - want).norm() / want.norm())
            for found, want in zip(plain_logits(model), expected, strict=True)
        )
        if error < tolerance:
            return True
        reason = f"logits differ by {error:.2g}"
    except Exception as failure:  # a model that reaches into its layers, for one
        reason = first_line(failure)
    log.warning("the layers of %s stay as they are, which is slower: %s", type(model).__name__, reason)
    for parent, name, again in replaced:
        setattr(parent, name, again())
    return False
