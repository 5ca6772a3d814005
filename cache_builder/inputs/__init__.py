"""Reading of users' files, in many formats, as records, conversations and token ids."""
