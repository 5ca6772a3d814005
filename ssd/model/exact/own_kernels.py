"""Kernels of our own on CUDA, in the place of libraries' that choose the order of their sums by the shape of a pass."""

from __future__ import annotations

from ssd.model.kv.triton_attention import exact_triton_attention
from ssd.model.layers.replace import Replaced
from ssd.model.layers.triton_linear import exact_linears
from ssd.model.ways.slot_target import SlotTarget


class OwnKernels:
    """Linear layers and attention of a target whose rows have the same bits in any pass, of chains: no trees."""

    def __init__(self, target: SlotTarget) -> None:
        self._target, self._had_trees = target, target.can_verify_trees
        self._replaced: list[Replaced] = []

    def use(self, wanted: bool) -> None:
        """Compute with them from now on, or with what was there; recorded passes are recorded anew."""
        target = self._target
        if wanted == (target.kv_cache.kernel is not None):
            return
        target.kv_cache.kernel = exact_triton_attention if wanted else None
        target.can_verify_trees = self._had_trees and not wanted
        if wanted:
            self._replaced = list(exact_linears(target.model))
        else:
            for parent, name, again in self._replaced:
                setattr(parent, name, again())
        target.renew_steps()
