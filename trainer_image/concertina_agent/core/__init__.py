"""State machine of the agent. It receives events and returns effects, and has no side effects itself."""
