"""Conversion between text and token ids: ``codec`` for complete texts, ``detokenizer`` for text being generated."""
