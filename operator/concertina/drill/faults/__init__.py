"""Faults that drills inject into a running job.

Each fault is a context manager. On entry, it injects the fault and yields a description of it (an Injection). On exit,
it reverts the fault.
"""
