"""Building of cache directories from text. A directory appears complete or not at all."""
