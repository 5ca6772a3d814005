"""The commands of ``ssd-cache``, a module each: its arguments, and what it prints."""
