"""The layouts in which draft heads are published, and how each becomes a head."""
