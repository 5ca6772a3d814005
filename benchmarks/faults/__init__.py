"""Faults, injected into a real server under a load whose every answer is verified."""
