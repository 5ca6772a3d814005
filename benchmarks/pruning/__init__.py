"""How much of a smaller cache's use `ssd-cache prune` keeps."""
