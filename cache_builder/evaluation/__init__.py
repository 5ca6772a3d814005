"""Estimation, from recorded requests, of the speed-up from a cache on a given device."""
