"""What one replica learns, the others know a moment later: one bounded Redis stream per namespace.

``redis_log`` is the whole of it: ``writer`` writes the streams, ``reader`` reads them, ``entry`` is their format,
``stream`` pages of them, ``bookmark`` remembers over restarts what was read; ``push`` fills one from a warm-up
directory. ``connection`` and ``clients`` lead to a server, to the master that sentinels name or to a cluster; ``link``
is a thread that lives with it, ``stats`` count how it goes. ``published`` is the whole text, for those that join.
"""
