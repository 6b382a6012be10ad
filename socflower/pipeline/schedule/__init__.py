"""Schedules: the order of forward and backward passes, and its execution in virtual time."""
