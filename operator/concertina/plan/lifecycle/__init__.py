"""Lifecycle of a job, from its first start to its end, including waiting."""
