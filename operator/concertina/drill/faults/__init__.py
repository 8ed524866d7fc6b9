"""Faults of drills: each is a context manager that injects a fault, yields an Injection, and reverts the fault."""
