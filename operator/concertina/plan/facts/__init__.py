"""What a pass knows of its job, beyond what it is given."""
