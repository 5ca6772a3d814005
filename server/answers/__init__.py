"""Serialize answers, complete or streamed."""
