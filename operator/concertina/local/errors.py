"""Errors of the local cluster, each with a sentence for the user."""


class LocalClusterError(Exception):
    """Problem that the user must know or fix. The message says what happened, why, and what to do."""
