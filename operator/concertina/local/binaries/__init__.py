"""The programs of Kubernetes and others that the cluster runs: fetched, checked, or built from Go modules."""
