"""The tools with which numba kernels are written: records in memory, and machine code stored on disk."""
