"""Fills a retrieval cache from text that exists already, so that a server is fast from its first request. No torch."""
