"""How many tokens does a verify step emit? Drafters replayed on recorded outputs, no model needed."""
