"""What is done to a job: each fault is a context manager that injects, yields an Injection, and reverts."""
