"""Tests of published OpenAI-compatible clients against a running ``ssd-serve``."""
