"""Shared code of the commands: the connection to a cluster, and terminal views of jobs."""
