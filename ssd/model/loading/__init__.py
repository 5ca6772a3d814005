"""Loading of a model by name or directory, up to a target that is ready to serve."""
