"""What a model's text says beside content: tool calls and reasoning."""
