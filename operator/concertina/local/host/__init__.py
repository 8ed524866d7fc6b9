"""What of this machine is used: folders, processes, namespaces, a terminal."""
