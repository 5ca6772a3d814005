"""What is sent back, whole and in chunks."""
