"""Controller of TrainingJobs. In a planning pass, it observes a job, plans, and applies the plan."""
