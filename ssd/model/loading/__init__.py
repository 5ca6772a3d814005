"""From a name or a directory to a target that is ready to serve."""
