"""Implementations of `Tracker`: one module for each tool. Only that module imports the tool."""
