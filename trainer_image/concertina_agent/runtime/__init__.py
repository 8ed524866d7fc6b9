"""Runtime of all parts of the agent: background tasks, and notification of changes."""
