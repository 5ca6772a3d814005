"""Validation of request bodies: pydantic models of all APIs."""
