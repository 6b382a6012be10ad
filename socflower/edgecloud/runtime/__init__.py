"""What trains: halves of torch models and the loops that drive them."""
