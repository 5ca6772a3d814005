"""The command line, and the start and the end of the process."""
