"""Metrics of this agent for Prometheus: training on rank 0, and the pod's workers, network and GPUs.

A separate thread answers scrapes. For each scrape, it asks the agent's event loop for the agent's state.
"""
