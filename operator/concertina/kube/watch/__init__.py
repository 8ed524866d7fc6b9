"""Long-running parts: reflectors, the Lease, events, and TrainingJobs by kopf."""
