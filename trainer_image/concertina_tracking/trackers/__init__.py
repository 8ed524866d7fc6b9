"""Implementations of `Tracker`, one module for each tool. A tool is imported only by its own module."""
