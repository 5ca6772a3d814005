"""From examples to a directory of segments, which appears whole or not at all."""
