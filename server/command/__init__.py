"""The command line, and what starts and stops the process."""
