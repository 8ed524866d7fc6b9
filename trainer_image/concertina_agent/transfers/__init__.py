"""Transfers of an agent: copies of peers' snapshots, uploads, learned modules, and records for a tracking tool."""
