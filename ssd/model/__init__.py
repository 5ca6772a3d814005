"""The target model: what the engine needs of one, how it is loaded, driven and sampled from, and draft models."""
