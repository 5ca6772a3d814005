"""Build retrieval caches from existing text, so that a server drafts from its first request on. Imports no torch."""
