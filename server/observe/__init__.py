"""Logs, metrics and traces for operators of the server."""
