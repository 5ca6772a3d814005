"""Requests while the engine works on them."""
