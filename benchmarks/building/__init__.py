"""How fast a corpus becomes a cache, and in how much memory."""
