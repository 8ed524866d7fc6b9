"""Prediction of a job's memory and communication, by running the trainer's own code without data.

The code runs on any machine, with fake tensors (which have shapes but no values) and in a fake process group.
"""
