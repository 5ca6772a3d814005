"""Tests of answers, stored text and memory under load, faults and crashes: ``python -m benchmarks.reliability``."""
