"""Where to cut, what a cut costs, when to move it; the pipeline in virtual time."""
