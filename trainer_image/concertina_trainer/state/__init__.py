"""State of a rank: in node memory, as a file, and back into tensors."""
