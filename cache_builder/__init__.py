"""Build retrieval caches from existing text, so that a server drafts from its first request on. Imports no torch."""


class Terminated(BaseException):
    """The exception that ``ssd-cache`` raises at SIGTERM, so that ``finally`` blocks remove partial results."""
