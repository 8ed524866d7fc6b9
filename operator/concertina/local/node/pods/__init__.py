"""Pods of a node, as its kubelet runs them."""
