"""Which pods there should be."""
