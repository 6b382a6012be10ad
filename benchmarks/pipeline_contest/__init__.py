"""Unequal devices as processes with CPU quotas, in network namespaces behind limited links, that train together."""
