"""Sums of gradients inside a group: what a member encodes and keeps, and a group whose members are in one process."""
