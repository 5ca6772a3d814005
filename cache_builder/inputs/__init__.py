"""What people have, as token ids: files and their formats, records, examples."""
