"""The commands of ``ssd-cache``, one module each, with the arguments, the work and the output of the command."""
