"""A torch model read once: layer profile, operations, cut points, and the two halves at a cut."""
