"""Access to this machine: folders, processes, Linux namespaces, and the terminal."""
