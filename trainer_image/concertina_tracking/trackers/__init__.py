"""Trackers, one module for each tool, which imports the tool."""
