"""Admission control: authenticate HTTP requests, enforce quotas, and schedule work fairly between tenants.

``connections`` limits what a client may send and how slowly, and ``auth_middleware`` authenticates requests by API key.
``quotas`` counts each tenant's requests and tokens and reserves shared memory budgets. ``fair_executor`` runs work of
all tenants in round-robin order. ``tenant_config`` parses the operator's file, ``registry`` stores the tenants and
derives the names of their caches, and ``tenant_loader`` creates and reloads them.
"""
