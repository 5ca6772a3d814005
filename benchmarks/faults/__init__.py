"""Faults, injected into real servers under a load whose every answer is verified.

``scene`` runs the processes, ``load`` asks and verifies, ``table`` holds the faults, ``history`` says whether what was
acknowledged is where it belongs, ``command`` prints.
"""
