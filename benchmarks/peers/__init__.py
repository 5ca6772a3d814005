"""Other people's drafters, each in a process and an environment of its own, timed where they run.

``make bench-peers`` creates the environment. `client.Peer` starts one peer and asks it; `process` is the other end, run
by the peers' own interpreter. Nothing here imports ``ssd``.
"""
