"""Tenants: whose key it is, what each may use, and which cache is whose.

``rules`` and ``rules_file`` say who there is, ``allowance``, ``account`` and ``admission`` count what each uses,
``namespace_names`` and ``generations`` say which cache is whose, ``registry`` holds them together and ``watch`` keeps
them up to date. The only way to them is a key: `Tenants.find`.
"""
