"""What can be done with a cache directory that exists."""
