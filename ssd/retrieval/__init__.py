"""The retrieval cache: what was said before, searchable.

``ring`` takes tokens in, ``index`` keeps them as a ring tail and sorted segments, ``cache`` runs it per namespace with
files (``segment_file``, ``directory``) and a rebuild process (``worker``). Readers only ever hold a ``Snapshot``.
"""
