"""Write measured figures into the documentation: ``python -m benchmarks.report``."""
