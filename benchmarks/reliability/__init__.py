"""Does the system stay right, whole and small under load, faults and crashes? ``python -m benchmarks.reliability``."""
