"""Clusters with round numbers."""

from tests.toy_clusters import add_ring, make_cluster, toy  # noqa: F401 - fixtures
