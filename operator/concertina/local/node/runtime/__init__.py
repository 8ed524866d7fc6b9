"""Process 1 of a node, and what a container is made of."""
