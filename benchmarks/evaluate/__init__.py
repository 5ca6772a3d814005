"""What ``ssd-cache evaluate`` says of a log, beside what the engine does with the same requests."""
