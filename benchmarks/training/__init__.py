"""Training and evaluation of the bundled model and its draft head. This package is not installed with the server."""
