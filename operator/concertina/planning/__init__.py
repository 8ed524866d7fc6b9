"""Estimates for a layout before anything runs: memory, time and cost.

The modules are pure and don't need torch.
"""
