"""Observe, plan, apply: the passes of a job run one after the other."""
