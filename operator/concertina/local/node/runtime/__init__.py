"""Process 1 of a node, and the parts of a container."""
