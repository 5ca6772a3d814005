"""The web UI at /, a playground that shows drafts, and the API documentation at /docs."""
