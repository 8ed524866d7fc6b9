"""Faults of drills.

Each is a context manager that injects a fault, yields an Injection, and reverts the fault on exit.
"""
