"""One cluster on disk: its folder and record, and the common end of its processes and files."""
