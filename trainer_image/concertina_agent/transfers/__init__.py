"""Transfers: copies of peers' snapshots, uploads to storage, learned modules, and records for the tracker."""
