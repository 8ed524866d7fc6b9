"""From the first start to the end of a job, and what waits."""
