"""Requests while the engine processes them: tokenization, the engine's thread, and the outputs."""
