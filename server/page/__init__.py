"""The page at /: a playground that shows the drafts at work."""
