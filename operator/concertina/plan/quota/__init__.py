"""Kueue quota of a job: how much to request, how many pods the job may have, and what to return."""
