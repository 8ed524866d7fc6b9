"""The launcher that runs as process 1 of every replica. Standard library only, Python 3.9+."""
