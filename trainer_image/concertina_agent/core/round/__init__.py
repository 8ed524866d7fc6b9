"""State of one round as its members know it: its members, the workers, failures and stragglers. No side effects."""
