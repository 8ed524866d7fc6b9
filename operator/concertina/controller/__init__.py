"""Controller of TrainingJobs. Each pass over a job observes the job, plans, and applies the plan."""
