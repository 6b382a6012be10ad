"""The input of the planner: a model by layers, and seconds of each layer, measured or estimated."""
