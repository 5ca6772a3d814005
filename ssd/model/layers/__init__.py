"""Replacement of a Hugging Face model's layers by faster ones, and hooks that read hidden states."""
