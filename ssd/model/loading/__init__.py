"""Loads a model by name or directory, and creates a target from it that is ready to serve."""
