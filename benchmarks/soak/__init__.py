"""Hours of traffic of every kind against one server. See ``python -m benchmarks.soak --help``."""
