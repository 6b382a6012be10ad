"""The engines that run an app: `local` (virtual time), Flower's `simulation`, `deployment`; and checkpoints."""
