"""A pipeline of processes that fail on request, for `benchmarks/recovery.py`."""
