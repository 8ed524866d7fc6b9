"""What failed, and what is done about it."""
