"""Fixtures that several test files share."""

from __future__ import annotations

from hypothesis import settings

# Seeded: a failure seen once is seen again.
settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.load_profile("repeatable")
