"""State of the cluster as the operator knows it. `cluster_cache` returns one consistent observation of a job."""
