"""Drafters that run a neural network, which is a draft model or a draft head."""
