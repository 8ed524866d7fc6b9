"""Errors of the local cluster. Each message is a sentence for the user."""


class LocalClusterError(Exception):
    """Error that the user must solve or know about. The message says what happened, why, and what to do."""
