"""What carries the bytes of a ring: gloo, gRPC with TLS, or memory of this process."""
