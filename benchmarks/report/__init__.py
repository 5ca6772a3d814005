"""Write measured figures into docs/: ``python -m benchmarks.report``."""
