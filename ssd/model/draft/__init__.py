"""Drafters that run a neural network: a draft model or a draft head."""
