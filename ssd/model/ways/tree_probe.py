"""The check that a model scores trees: it is fed one, as everything about how a model is driven is tried."""

from __future__ import annotations

import logging

import numpy as np
import torch

from ssd.model.ways.slot_target import SlotTarget

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
