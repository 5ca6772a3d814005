"""Sampling: the selection of the target model's next tokens from its logits."""
