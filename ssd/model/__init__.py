"""The target model: loading, the slot KV cache, sampling with keyed noise, verification."""
