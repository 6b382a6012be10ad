"""A ring of members that train one model: steps, gradient exchange, compression, batch shares, turns."""
