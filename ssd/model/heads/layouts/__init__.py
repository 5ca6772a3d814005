"""The layouts in which draft heads are published, and how each becomes a head."""

from __future__ import annotations

from ssd.model.heads.layouts.eagle import EAGLE_LAYOUTS
from ssd.model.heads.layouts.eagle3 import EAGLE3_LAYOUTS
from ssd.model.heads.layouts.layout import Layout
from ssd.model.heads.layouts.medusa import MEDUSA_LAYOUTS
from ssd.model.heads.layouts.mtp import MTP_LAYOUTS

LAYOUTS: tuple[Layout, ...] = (*EAGLE3_LAYOUTS, *EAGLE_LAYOUTS, *MEDUSA_LAYOUTS, *MTP_LAYOUTS)
"""Tried in order; the first that matches is taken."""
