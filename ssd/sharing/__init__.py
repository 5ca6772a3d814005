"""What one replica learns, the others know a moment later: one bounded Redis stream per namespace.

``redis_log`` writes and reads the streams, ``entry`` is their format, ``bookmark`` remembers over restarts what was
read, ``push`` fills a stream from a warm-up directory. ``bounded_parser``, ``pages`` and ``append`` stand between them
and a server that others write to as well. ``connection`` leads to one server, to the master that ``sentinels`` name or
to a ``cluster``; ``reception`` and ``refusals`` count how it goes.
"""
