"""State of the cluster as the operator knows it. `cluster_cache` derives a consistent observation of each job."""
