"""Splice measured figures into the README: ``python -m benchmarks.report``."""
