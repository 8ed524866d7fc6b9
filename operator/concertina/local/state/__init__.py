"""State of a local cluster on disk: its folder and record, and the removal of its processes and files."""
