"""How the bundled model was trained and judged; not installed, as nothing that serves needs it."""
