"""Splice measured figures into README.md, SECURITY.md and docs/: ``python -m benchmarks.report``."""
