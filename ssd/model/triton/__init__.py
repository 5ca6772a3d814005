"""Triton kernels for GPUs: layers, attention over the KV cache, and sampling. They require triton."""
