"""Parse tool calls and reasoning from a model's text."""
