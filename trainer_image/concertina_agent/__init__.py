"""Agent, which runs as process 1 of every replica. It starts and watches the replica's workers.

The package uses the standard library only and supports Python 3.9 and later.
"""
