"""Faults that drills inject into a running job.

Each fault is a context manager that injects the fault, yields an Injection, and reverts the fault on exit.
"""
