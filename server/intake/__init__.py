"""What a request passes first: the gate, its body, its texts."""
