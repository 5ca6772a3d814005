"""Serialize the HTTP responses of all APIs, complete or streamed."""
