"""Parsing of tool calls and reasoning in a model's output."""
