"""Errors of the local cluster. Each message is a sentence for the user."""


class LocalClusterError(Exception):
    """Problem that the user must know or solve. The message says what happened, why, and what to do."""
