"""Files of one cluster: its folder and record, and the end of its processes and files."""
