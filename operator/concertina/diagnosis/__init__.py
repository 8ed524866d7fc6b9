"""Diagnosis of a training run: find its problems from the job's status, metrics and logs.

The modules are pure: the caller reads the inputs.
"""
