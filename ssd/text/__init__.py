"""Conversion between text and token ids: ``codec`` for complete texts, ``stream`` for text that is being generated."""
