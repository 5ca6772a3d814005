"""Our drafter inside vLLM, beside vLLM alone, with its n-gram proposer, and with the suffix tree of arctic-inference.

``make bench-vllm`` creates the environment and runs it. Each engine is a process of that environment (``engines``),
asked by ``client``.
"""
