"""Training by a pipeline plan: each device's passes, what devices send each other, and drivers that run them."""
