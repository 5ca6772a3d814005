"""Draft models and draft heads as drafters."""
