"""What compiled functions are built on: memory by its address, machine code kept on disk."""
