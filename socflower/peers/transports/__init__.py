"""Transports of a ring: gloo, gRPC with TLS, or queues within one process."""
