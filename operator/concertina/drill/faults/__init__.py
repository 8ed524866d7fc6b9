"""What is done to a job: each fault is a context manager that hurts, yields an Injection, and heals."""
