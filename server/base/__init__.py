"""Definitions that all parts of the server use: errors, limits, settings, and the record of a request."""
