"""The subcommands of ``ssd-cache``, one module each."""
