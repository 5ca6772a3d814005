"""Admission: what a request costs before it has a slot, who pays, and whose turn it is.

``connections`` and ``gate`` let in, and read within a budget. A key leads to an account, `Tenants.find`, and to
no other: ``account`` counts what it uses of what all share and of its own quotas, ``lanes`` give turns. ``rules`` say
who there is, ``registry`` holds them and says which cache is whose, ``opening`` makes and reloads them.
"""
