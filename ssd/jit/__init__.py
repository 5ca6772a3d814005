"""The tools for writing numba kernels: records in memory, and a cache of machine code on disk."""
