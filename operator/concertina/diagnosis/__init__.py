"""Diagnosis of a run from its status, metrics and logs.

The modules are pure: the caller reads the inputs.
"""
