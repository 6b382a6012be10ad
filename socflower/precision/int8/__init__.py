"""The integer engine: a network that trains in int8 (Mandheling section 3)."""
