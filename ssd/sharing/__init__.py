"""What one replica learns, the others know a moment later: one bounded Redis stream per namespace.

``redis_log`` is the whole of it: ``writer`` writes the streams, ``reader`` reads them, ``entry`` is their format and
names, ``stream`` pages of them, ``cursor`` how far one was read, over restarts too. ``connection`` and ``clients`` lead
to a server, to the master that sentinels name or to a cluster; ``background`` is a thread that lives with it, ``stats``
count how it goes. ``published`` is the whole text, for those that join.
"""
