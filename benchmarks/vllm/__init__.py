"""Benchmarks of SSD as a drafter inside vLLM, compared with vLLM's own drafting methods.

``make bench-vllm`` creates the environment and runs them. Each engine is a process in that environment (``engines``),
which ``client`` starts and calls.
"""
