"""Build retrieval caches from existing text, so that a server drafts from its first request on. Imports no torch."""


class Terminated(BaseException):
    """The process received SIGTERM. While this exception propagates, partial results are removed."""
