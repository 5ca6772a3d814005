"""Other people's clients, as they are published, against a server of ours: what each did, and what it got."""
