"""Records of the run from a coordinator's agent to its tracking process, on a spool in the node's volume."""
