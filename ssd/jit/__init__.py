"""The foundation of compiled kernels: records and arrays at addresses, machine code on disk, SIMD."""
