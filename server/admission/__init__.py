"""Admission: authenticate requests, count what they use before they have a slot, and take turns between tenants.

``connections`` reads requests within limits, and ``gate`` authenticates them. A key leads to one account only, see
`Tenants.find`. ``account`` counts the use of shared budgets and of a tenant's quotas, ``lanes`` run work in turns,
``rules`` parses the operator's file, ``registry`` holds the tenants and names their caches, and ``opening`` creates and
reloads them.
"""
