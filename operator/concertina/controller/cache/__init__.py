"""Caches of the cluster's objects. `cluster_cache` derives from them a consistent observation of each job."""
