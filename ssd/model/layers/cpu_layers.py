"""All faster layers that there are for a CPU."""

from __future__ import annotations

from typing import Final

from ssd.model.layers.activations import fuse_activations
from ssd.model.layers.fused_norm import fuse_norms
from ssd.model.layers.fused_rotary import fuse_rotary
from ssd.model.layers.own_products import exact_products
from ssd.model.layers.packed_linear import pack_linears
from ssd.model.layers.replace import Replace

CPU_LAYERS: Final[tuple[Replace, ...]] = (pack_linears, fuse_norms, fuse_rotary, fuse_activations, exact_products)
