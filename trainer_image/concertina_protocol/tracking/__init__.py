"""Records of the run that a coordinator's agent writes to a spool in the node's volume, for its tracking process."""
