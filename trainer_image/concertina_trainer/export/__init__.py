"""Export of a checkpoint in the format that transformers reads."""
