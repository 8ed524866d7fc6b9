"""Facts that a pass derives from its input."""
