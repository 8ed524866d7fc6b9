"""Controller of TrainingJobs. In each planning pass, it observes one job, makes a plan, and applies the plan."""
