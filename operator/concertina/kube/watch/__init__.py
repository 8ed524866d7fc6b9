"""What goes on: reflectors, the Lease, events, and TrainingJobs by kopf."""
