"""Resources of this machine: folders, processes, namespaces, a terminal."""
