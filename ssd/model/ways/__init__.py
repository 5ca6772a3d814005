"""The ways to drive a model, and the search for the fastest that computes what the model computes."""
