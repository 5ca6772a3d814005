"""What requests may contain."""
