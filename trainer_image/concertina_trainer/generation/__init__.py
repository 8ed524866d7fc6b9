"""Text from a checkpoint: the model continues a prompt."""
