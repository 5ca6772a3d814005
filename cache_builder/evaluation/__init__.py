"""Estimate from recorded requests what a cache would save on a given device."""
