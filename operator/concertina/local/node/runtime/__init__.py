"""Runtime of a node: its process 1, and the set-up of containers."""
