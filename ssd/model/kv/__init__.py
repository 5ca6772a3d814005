"""What was read already: keys and values at (slot, position), who sees which, and attention over them."""
