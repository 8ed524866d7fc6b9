"""Processes that an agent starts and ends: workers, and the parent processes from which they are forked."""
