"""How well do replicas draft from one log, and what breaks first? See ``python -m benchmarks.fleet --help``."""
