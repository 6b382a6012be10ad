"""Clients of split training: edges with a cloud in the same process or far away."""
