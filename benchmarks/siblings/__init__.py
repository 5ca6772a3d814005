"""What samples of one prompt bring each other while they run."""
