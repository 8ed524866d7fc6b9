"""A model of a user's own whose module can't be imported."""

raise RuntimeError("no GPU in this module")
