"""Plan which of a job's pods to create and delete."""
