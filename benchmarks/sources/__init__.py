"""What each source of drafts brings alone, and all together, on text that never repeats."""
