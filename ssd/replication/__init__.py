"""Replication of the retrieval cache: replicas exchange text through one bounded Redis stream per namespace.

``replication_log`` is the entry point and publishes to the streams; ``subscriber`` reads them. ``entry`` defines the
format of stream entries, ``redis_stream`` reads and writes pages of entries, and ``offsets`` records how far a stream
was read, also across restarts. ``connection`` and ``clients`` connect to a Redis server, to the master that Redis
Sentinel reports, or to a cluster. ``background`` has the threads that read and write.
"""
