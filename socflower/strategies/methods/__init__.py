"""What a round is: training in groups, in a pipeline, or split between edges and a cloud."""
