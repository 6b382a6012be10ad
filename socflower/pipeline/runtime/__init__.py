"""Training by a pipeline plan: each device's passes, the messages between devices, and drivers that run them."""
