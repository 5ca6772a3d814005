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


def head_key(fingerprint: str, namespace: str) -> str:
    """The head of the text that a replica published (``published.head``)."""
    return namespace_key(fingerprint, namespace) + ":head"


def layer_key(fingerprint: str, namespace: str) -> str:
    """The head of the text that was pushed: searched by all, evicted by none."""
    return namespace_key(fingerprint, namespace) + ":layer"


def chunks_key(fingerprint: str, namespace: str) -> str:
    """The hash of both heads' chunks, by name."""
    return namespace_key(fingerprint, namespace) + ":chunks"


def lease_key(fingerprint: str, namespace: str) -> str:
    """Who publishes, for as long as the key lives."""
    return namespace_key(fingerprint, namespace) + ":lease"


def fence_key(fingerprint: str, namespace: str) -> str:
    """How often that changed: the fencing number of the newest lease."""
    return namespace_key(fingerprint, namespace) + ":fence"


def purge_key(fingerprint: str, namespace: str) -> str:
    """A demand to forget the namespace (``published.presence``)."""
    return namespace_key(fingerprint, namespace) + ":purge"


def member_key(fingerprint: str, namespace: str, member: str) -> str:
    """What the server ``member`` says of a namespace that it has open."""
    return f"{namespace_key(fingerprint, namespace)}:member:{member}"


def all_keys(fingerprint: str, namespace: str) -> list[str]:
    """Every key that holds something a namespace said, or says who may publish it."""
    named = (stream_key, head_key, layer_key, chunks_key, lease_key, fence_key)
    return [key(fingerprint, namespace) for key in named]
