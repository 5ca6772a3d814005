"""The retrieval cache: an index of finished sequences, from which later requests are drafted.

New sequences enter the ring buffer (``ring``). ``index`` has the memtable, which is the newest part of the ring, and
the sorted segments. ``namespace_cache`` is the cache of one namespace: it appends, flushes and merges. ``directory``
stores a namespace's segments in files. ``cache_manager`` manages the caches of all namespaces. Readers only ever use an
immutable ``Snapshot``.
"""
