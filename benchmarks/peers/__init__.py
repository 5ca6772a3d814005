"""Drafters of other projects ("peers"), each run in its own process and virtual environment.

``make bench-peers`` creates the environment. `client.Peer` starts one peer and sends it requests; `process` answers
them in the peers' own interpreter. No module of this package imports ``ssd``.
"""
