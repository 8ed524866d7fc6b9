"""Local Kubernetes cluster: a real control plane, and nodes that run pods as processes of this machine."""
