"""Random trainings on small clusters: each predicted by virtual time, then measured between network namespaces."""
