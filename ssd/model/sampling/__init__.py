"""Sampling: from logits to the target's tokens."""
