"""The tools with which numba kernels are written: records in memory, machine code stored on disk, and SIMD code."""
