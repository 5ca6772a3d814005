"""The retrieval cache: what was said before, searchable.

``ring`` takes tokens in, ``index`` keeps them as its tail and sorted segments, ``suffix_cache`` is one namespace's
cache: it learns, seals and merges; ``directory`` keeps it in files. ``cache`` is all of a server's.
Readers only ever hold a ``Snapshot``.
"""
