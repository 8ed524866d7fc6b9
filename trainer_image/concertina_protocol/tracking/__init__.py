"""Records of the run that a coordinator's agent writes for the process that sends them to a tracking tool."""
