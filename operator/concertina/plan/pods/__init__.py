"""Plans for a job's pods."""
