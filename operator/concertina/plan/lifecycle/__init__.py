"""Policies for the lifecycle of a job: first start, waiting, suspension and end."""
