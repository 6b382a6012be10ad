"""Leaders of groups: they sum their models in a ring or a tree and send compressed changes."""
