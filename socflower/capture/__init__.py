"""A torch model read once: its layer profile, its operations, the places where it can be cut, its halves."""
