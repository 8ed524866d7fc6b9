"""A checkpoint in the shape that transformers reads."""
