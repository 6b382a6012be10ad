"""Planners: which layers on which devices with which samples (F29 to F32), and their peers."""
