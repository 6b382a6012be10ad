"""Heat: sensors, thermal model, fans, and limits of what a device gives to training. Needs no torch."""
