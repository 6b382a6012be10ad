"""Generated from split.proto by `make proto`: the messages of the edge–cloud stream."""
