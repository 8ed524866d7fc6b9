"""Caches of the cluster's objects. `cluster_cache` combines them into a consistent observation of each job."""
