"""Gradient exchange among machines, without Flower: members, transports, compression, balance, preemption."""
