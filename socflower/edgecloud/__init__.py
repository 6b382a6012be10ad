"""Training split between a thin edge and a cloud: cut, feature replay, feature codec, decision engine, gRPC runtime."""
