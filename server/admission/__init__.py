"""Tenants: whose key it is, what each may use, and which cache is whose.

``rules`` and ``rules_file`` say who there is, ``account`` counts what each uses, ``turns`` says whose turn it is and
who has room, ``namespace_names`` and ``generations`` say which cache is whose, ``registry`` holds them together and
``watch`` keeps them up to date. The only way to them is a key: `Tenants.find`.
"""
