"""From logits to the target's tokens."""
