"""How soon do others draft what one replica learned? See ``python -m benchmarks.sharing_latency --help``."""
