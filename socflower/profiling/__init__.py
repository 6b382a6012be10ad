"""Measurements of this device: training steps and operators, power, and the link to another machine."""
