"""What things are called in Redis.

All keys of one namespace have the same hash tag, the part in braces, so that a cluster keeps them on one node and a
transaction over several of them is possible.
"""

from __future__ import annotations

KEYS_VERSION = 1


def namespace_key(fingerprint: str, namespace: str) -> str:
    """What the names of all keys of a namespace begin with.

    Replicas share exactly when the tokenizer, by its fingerprint, and the namespace are the same.
    """
    return f"ssd:{KEYS_VERSION}:{{{fingerprint}:{namespace}}}"


def stream_key(fingerprint: str, namespace: str) -> str:
    """The stream that replicas append to what they completed."""
    return namespace_key(fingerprint, namespace)
