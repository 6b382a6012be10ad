"""gRPC streams between edge and cloud: frames in order and exactly once, arrays as bytes, credentials."""
