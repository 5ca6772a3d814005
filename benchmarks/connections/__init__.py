"""Thousands of idle connections beside a client that works. See ``python -m benchmarks.connections --help``."""
