"""Replication of the retrieval cache: replicas exchange text through one bounded Redis stream per namespace.

``replication_log`` is the entry point and publishes to the streams; ``subscriber`` reads them. ``entry`` is the format
of their entries, ``stream`` reads and writes pages of them, and ``offsets`` records how far a stream was read, also
across restarts. ``connection`` and ``clients`` connect to a Redis server, to the master that sentinels name, or to a
cluster. ``background`` is the thread for each direction. ``noise_secret`` is the secret of shared sampling noise.
"""
