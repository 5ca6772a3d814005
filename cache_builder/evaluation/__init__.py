"""What a user's own logs say about this service: what steps cost where it would run, and the page that shows it."""
