"""Plans of split training: costs of cuts, decisions to move the cut, and the pipeline in virtual time."""
