"""A Flower App that trains a model over an edge and a cloud: SplitReplay in server_app.py, its client beside it."""
