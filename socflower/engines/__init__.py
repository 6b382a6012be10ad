"""Where an app runs: `local` (virtual time), Flower's `simulation`, `deployment`; and checkpoints of runs."""
