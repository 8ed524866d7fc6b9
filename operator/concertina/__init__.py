"""A Kubernetes operator for elastic training jobs."""
