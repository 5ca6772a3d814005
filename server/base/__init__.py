"""Definitions for all parts of the server: errors, limits, budgets, lanes, settings."""
