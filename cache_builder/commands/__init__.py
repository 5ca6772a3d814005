"""The commands of ``ssd-cache``, a module each: its arguments, what it does, and what it prints."""
