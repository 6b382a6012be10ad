"""Clusters with round numbers."""

from tests.toy_clusters import make_cluster, toy  # noqa: F401 - fixtures
