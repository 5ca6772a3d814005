"""The promise that a position's logits are the same bits in every pass."""
