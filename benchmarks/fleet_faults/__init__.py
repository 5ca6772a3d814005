"""Faults between several real servers and the Redis they share through, under a load whose every answer is verified.

``proxy`` stands on each server's way to Redis and spoils it, ``fleet`` runs the processes, ``network``, ``store`` and
``members`` hold the faults, ``rounds`` judges, ``steps`` compares the steps of a server that shares with one that does
not, ``command`` prints.
"""
