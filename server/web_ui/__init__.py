"""The web UI at /, which shows drafts in generated text, and the API documentation at /docs."""
