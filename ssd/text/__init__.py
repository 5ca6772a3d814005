"""Text to token ids and back: ``codec`` for whole texts, ``stream`` for text that is still being generated."""
