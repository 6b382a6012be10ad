"""Papers beside ours: their tables and figures as numbers, each with its place, and what computes ours anew."""
