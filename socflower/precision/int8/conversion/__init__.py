"""Rules that turn what torch computes into nodes of the integer engine's network."""
