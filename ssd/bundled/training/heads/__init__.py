"""How draft heads for the bundled model are trained and measured."""
