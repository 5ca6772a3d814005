"""The HTTP service: the APIs of OpenAI and Anthropic over the engine."""
