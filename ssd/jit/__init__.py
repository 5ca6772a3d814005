"""The foundation of the numba kernels: records and arrays at memory addresses, machine code on disk, and SIMD code."""
