"""What trains: halves of torch models, the loops that drive them, and the gRPC streams between them."""
