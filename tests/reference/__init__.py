"""The slow twins: what the fast code must equal, short enough to be obviously right."""
