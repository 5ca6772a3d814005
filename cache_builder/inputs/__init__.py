"""Read the files that users have, in many formats, as records, conversations and token ids."""
