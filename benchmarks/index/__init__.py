"""Measurements of the retrieval index: memory, lookup time, time until new text is searchable, and indexing cost."""
