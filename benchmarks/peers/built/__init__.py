"""Peers whose C++ is compiled here: what of other people's sources is built, and how.

``make bench-peers`` runs `build` with the peers' own interpreter; the libraries lie in that environment.
"""
