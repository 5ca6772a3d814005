"""Layers, attention and sampling on a CPU, with the SIMD code that they are made of."""
