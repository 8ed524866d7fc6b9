"""Observe, plan, apply: one pass after the other for each job."""
