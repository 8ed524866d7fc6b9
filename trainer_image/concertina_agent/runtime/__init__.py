"""Background tasks of the agent, and notification about changes."""
