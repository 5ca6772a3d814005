"""The retrieval cache: what was said before, searchable.

``ring`` takes tokens in, ``index`` keeps them as its tail and sorted segments, ``upkeep`` seals, merges and writes
them (``directory``, ``merge_worker``), ``suffix_cache`` is one namespace's cache and ``cache`` all of
a server's. Readers only ever hold a ``Snapshot``.
"""
