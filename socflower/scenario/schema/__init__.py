"""The tables of a scenario file as validated values."""
