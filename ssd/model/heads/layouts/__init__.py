"""The layouts in which draft heads are published, and how each becomes a head."""

from __future__ import annotations

from ssd.model.heads.layouts.layout import Layout

LAYOUTS: tuple[Layout, ...] = ()
"""Tried in order; the first that matches is taken."""
