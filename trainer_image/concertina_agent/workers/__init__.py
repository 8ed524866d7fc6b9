"""The processes that an agent starts and ends."""
