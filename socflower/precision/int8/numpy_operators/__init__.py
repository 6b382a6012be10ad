"""Operators of the integer engine that NumPy computes, exactly."""
