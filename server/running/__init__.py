"""Requests while the engine processes them."""
