"""The HTTP server: the APIs of OpenAI and Anthropic on top of the engine."""
