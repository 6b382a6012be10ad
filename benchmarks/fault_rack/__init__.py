"""A rack of real processes in network namespaces whose parts are struck, for `benchmarks/fault_pairs.py` and others."""
