"""Metrics of this agent for Prometheus: rank 0's training, the pod's workers, its network and its GPUs.

A thread of its own answers scrapes. It asks the agent's event loop for its state once a scrape.
"""
