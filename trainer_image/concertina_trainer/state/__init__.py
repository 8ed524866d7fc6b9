"""A rank's part of the training state: in node memory, as a file, and back into tensors."""
