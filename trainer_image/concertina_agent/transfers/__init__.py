"""Transfers of an agent: copies of other replicas' snapshots, uploads, learned modules, and records of the run.

A snapshot is a copy of the training state in node memory.
"""
