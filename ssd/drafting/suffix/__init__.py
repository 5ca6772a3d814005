"""The suffix drafter, phase by phase: learn, follow or search, gather, vote, judge, extend."""
