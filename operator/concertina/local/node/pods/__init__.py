"""Pods as the kubelet of a node keeps them."""
