"""The HTTP service: OpenAI's endpoints over the engine."""
