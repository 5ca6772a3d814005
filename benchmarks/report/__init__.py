"""Write measured figures into SECURITY.md and docs/: ``python -m benchmarks.report``."""
