"""Programs of Kubernetes and others that the cluster runs: downloaded, verified, or built from Go modules."""
