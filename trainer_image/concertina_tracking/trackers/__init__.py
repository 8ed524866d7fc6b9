"""A module a tool, which imports it."""
