"""What coupled sampling brings, and how many tokens its noise should depend on."""
