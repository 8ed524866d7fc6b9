"""Prediction of what a job will use, from the code that it will run.

It runs under fake tensors, in a fake process group, on any machine.
"""
