"""Heat: sensors, the thermal model, clock governor, fans and their policies, and how fast SoCs really are.

Pure: the standard library and NumPy, and psutil where a machine is read.
"""
