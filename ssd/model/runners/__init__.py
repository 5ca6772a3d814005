"""Model runners, and the selection of the fastest runner that reproduces the model's own logits."""
