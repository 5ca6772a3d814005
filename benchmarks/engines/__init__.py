"""Comparison of the throughput of SSD and vLLM. See `benchmarks.engines.__main__`."""
