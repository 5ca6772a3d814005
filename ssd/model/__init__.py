"""The target model: loading, forward passes, KV cache and sampling; and draft models and draft heads."""
