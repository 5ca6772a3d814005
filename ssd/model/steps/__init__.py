"""Passes of fixed shape, recorded once and repeated with a single launch."""
