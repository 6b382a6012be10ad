"""Measuring this device: steps and operators, power, and the link to another machine."""
