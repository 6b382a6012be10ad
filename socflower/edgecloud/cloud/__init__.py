"""The cloud of split training: sessions of many runs, the gRPC service that hosts them, and calls to it."""
