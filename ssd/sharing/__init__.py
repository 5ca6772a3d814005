"""What one replica learns, the others know a moment later: one bounded Redis stream per namespace.

``redis_log`` writes and reads the streams, ``entry`` is their format, ``push`` fills one from a warm-up directory.
"""
