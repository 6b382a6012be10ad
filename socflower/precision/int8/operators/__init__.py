"""The operators of a graph, bound to their buffers for one batch size: `base` says what they have in common."""
