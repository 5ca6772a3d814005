"""The slot KV cache, the shapes of draft trees, and attention over the cache."""
