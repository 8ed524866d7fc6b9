"""Processes that an agent starts and ends: workers, and the warm processes from which workers are forked."""
