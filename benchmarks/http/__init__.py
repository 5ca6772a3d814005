"""What HTTP costs, see ``__main__``."""
