"""Faults between several real servers and the Redis they share through, under a load whose every answer is verified."""
