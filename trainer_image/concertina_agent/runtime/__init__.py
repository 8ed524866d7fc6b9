"""What all parts of the agent run on: its log, its background tasks, and waking those who wait."""
