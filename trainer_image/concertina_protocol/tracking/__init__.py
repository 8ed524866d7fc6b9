"""What a coordinator's agent tells its tracking process of the run: records, on a spool of files in the node's
volume."""
