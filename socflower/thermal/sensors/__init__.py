"""Temperatures, clocks and load of machines: Linux sensors, recordings, simulated and remote ones."""
