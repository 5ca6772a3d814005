"""Which engine is faster, SSD's or vLLM's? See `benchmarks.engines.__main__`."""
