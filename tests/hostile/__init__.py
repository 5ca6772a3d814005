"""What a client may send on purpose, and what it must cost nobody else."""
