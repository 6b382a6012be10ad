"""Heat: sensors, thermal model, fans, and limits on how much of a device training may use. Does not import torch."""
