"""Models, data sets, partitions among clients, and evaluation."""
