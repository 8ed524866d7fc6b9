"""Parallelism: groups of ranks, and what they communicate."""
