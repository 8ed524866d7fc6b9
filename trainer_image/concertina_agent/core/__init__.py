"""State of the agent, which consumes events and returns effects. The package has no side effects."""
