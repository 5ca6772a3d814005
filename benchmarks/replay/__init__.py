"""Replay of recorded outputs to count the tokens per verification step of different drafters, without a model."""
