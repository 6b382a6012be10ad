"""Gradient compression: exchange in fewer bytes than float32 sums."""
