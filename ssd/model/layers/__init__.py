"""Faster layers that replace those of a Hugging Face model and compute the same."""
