"""Learning from running inference engines: their KV events, joined to the texts of requests."""
