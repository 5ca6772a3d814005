"""The check that a way of driving a model computes what the model computes: at start-up, on the loaded weights."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import DynamicCache, PreTrainedModel, cache_utils

from ssd.model.layers.probe_logits import probe_texts
from ssd.model.target import Target, pad_rows
from ssd.model.ways.slot_target import SlotTarget

PROBE_SLOTS = 3
PROBE_WIDTH = 4
"""Most positions of a scored pass of the probe."""

_NoLayer: Any = getattr(cache_utils, "DummyLayer", None)
"""What stands for a layer that uses another's keys, in versions of transformers that do not leave it out."""

_STARTS = (9, 4)
"""Where scoring begins in either row; what comes before is prefilled in two parts."""


def relative_error(target: Target, expected: Sequence[torch.Tensor]) -> float:
    """How far ``target``'s logits are from ``expected``, as a share of their norm; the worse of two rows.

    Two texts in slots of reverse order and with different lengths, prefilled in parts, scored in passes of at most
    ``PROBE_WIDTH`` positions. Where the target promises to take tokens back, each pass comes after one over a wrong
    draft, which is taken back. ``target`` is left empty.
    """
    texts = probe_texts(target.model)
    slots = (PROBE_SLOTS - 1, 0)
    for slot, text, start in zip(slots, texts, _STARTS, strict=True):
        for part in (text[: start // 2], text[start // 2 : start]):
            target.prefill([slot], part[None], [len(part)])
    found: list[list[torch.Tensor]] = [[], []]
    while rows := [b for b in range(2) if target.length(slots[b]) < len(texts[b])]:
        parts = [texts[b][target.length(slots[b]) :][:PROBE_WIDTH] for b in rows]
        if target.can_roll_back:
            held = [target.length(slots[b]) for b in rows]
            _forward(target, [slots[b] for b in rows], [_wrong(target.model, part) for part in parts])
            for b, length in zip(rows, held, strict=True):
                target.rollback(slots[b], length)
        logits = _forward(target, [slots[b] for b in rows], parts)
        for index, (b, part) in enumerate(zip(rows, parts, strict=True)):
            found[b].append(logits[index, : len(part)].float())
    for slot in slots:
        target.rollback(slot, 0)
    errors = []
    for got, whole in zip(found, expected, strict=True):
        scored = torch.cat(got)
        want = whole[-len(scored) :]
        errors.append(float((scored - want).norm() / want.norm()))
    return max(errors)


def check_windows(target: SlotTarget) -> None:
    """Raise TypeError unless every layer attended as far back as the model's configuration says.

    The probe is shorter than the windows of real models, so it would not notice a layer that keeps its window to
    itself. After a pass.
    """
    layers = declared_layers(target.model)
    for index, reach in target.kv_cache.reach.items():
        declared = getattr(layers[index], "sliding_window", None) if index < len(layers) else None
        if reach != declared and not _uses_another(layers, index):
            raise TypeError(f"layer {index} attends to {reach or 'all'} positions, its configuration says {declared}")


def _uses_another(layers: Sequence[Any], index: int) -> bool:
    """Whether a layer computes with another's keys: it declares nothing."""
    if _NoLayer is None:  # such layers are the last ones
        return 0 < len(layers) <= index
    return index < len(layers) and isinstance(layers[index], _NoLayer)


def declared_layers(model: PreTrainedModel) -> list[Any]:
    """What each layer keeps of the past, as the layers of the cache that transformers makes from the configuration."""
    try:
        return list(DynamicCache(config=model.config).layers)
    except Exception:  # a kind of layer that has a cache of its own: nothing is known
        return []


def _forward(target: Target, slots: Sequence[int], rows: Sequence[npt.NDArray[np.int64]]) -> torch.Tensor:
    return target.forward(slots, pad_rows(rows), [len(row) for row in rows]).logits


def _wrong(model: PreTrainedModel, part: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    return (part[::-1] + 1) % int(model.config.get_text_config().vocab_size)


log = logging.getLogger(__name__)

_PREFIX = 9
_PARENTS = np.array([[-1, 0, 0, 1, 2]])
_PATHS = ([0, 1, 3], [0, 2, 4])


def verifies_trees(target: SlotTarget, *, tolerance: float) -> bool:
    """Whether every node of a tree is scored as in a pass over the path to it, and its path can be kept.

    tolerance : greatest relative error of the logits. Uses slot 0, which must be free. A model whose layers mix
    neighbours in some other way than by attention (a convolution, say) fails. Any failure means chains.
    """
    width = _PARENTS.shape[1]
    if target.max_width < width or target.max_length < _PREFIX + width:
        return False
    random = np.random.default_rng(0)
    tokens = random.integers(0, target.vocab_size, (1, _PREFIX + width + 1))
    prefix, tree, last = tokens[:, :_PREFIX], tokens[:, _PREFIX:-1], tokens[:, -1:]
    try:
        target.prefill([0], prefix, [_PREFIX])
        worst = 0.0
        for path in _PATHS:
            scored = target.forward_trees([0], tree, [width], _PARENTS).logits[:, path]
            target.keep_paths([0], [width], [np.array(path)])
            found = torch.cat([scored, target.forward([0], last, [1]).logits], 1).float()
            target.rollback(0, _PREFIX)
            chain = np.concatenate([tree[:, path], last], axis=1)
            expected = target.forward([0], chain, [chain.shape[1]]).logits.float()
            target.rollback(0, _PREFIX)
            worst = max(worst, float((found - expected).norm() / expected.norm()))
        if not worst < tolerance:
            log.warning(
                "trees differ on %s: relative error %.2g; drafts are chains", type(target.model).__name__, worst
            )
        return worst < tolerance
    except Exception:
        log.warning("trees failed on %s: drafts are chains", type(target.model).__name__, exc_info=True)
        return False
    finally:
        target.rollback(0, 0)
