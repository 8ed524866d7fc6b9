"""Agent that runs as process 1 of every replica.

It uses the standard library only and supports Python 3.9 and later.
"""
