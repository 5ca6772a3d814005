"""The command line of the server, and the start and shutdown of its process."""
