"""Everything that only a GPU can show, in a few calls. See ``python -m benchmarks.gpu_check --help``."""
