"""The slot-based KV cache, the shapes of draft trees, and attention over the cache."""
