"""Custom model whose module can't be imported."""

raise RuntimeError("no GPU in this module")
