"""What one replica learns, the others know a moment later: one bounded Redis stream per namespace.

``redis_log`` is the whole of it and writes the streams, ``reader`` reads them, ``entry`` is their format, ``stream``
pages of them, ``cursor`` how far one was read, over restarts too. ``connection`` and ``clients`` lead to a server, to
the master that sentinels name or to a cluster; ``background`` is a thread that lives with it. ``noise_root`` is
what replicas draw coupled noise from.
"""
