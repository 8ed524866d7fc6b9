"""Embedded cluster: a real Kubernetes control plane, and nodes that run pods as processes of this machine."""
