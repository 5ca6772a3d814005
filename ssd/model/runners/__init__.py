"""Model runners, and the selection of the fastest one that matches the model's own logits."""
