"""Compute the status that a planning pass writes: conditions, progress, time accounting, and traces of rounds.

A round is a period in which a fixed set of replicas trains.
"""
