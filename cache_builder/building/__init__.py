"""Turn examples into a directory of segments, which appears complete or not at all."""
