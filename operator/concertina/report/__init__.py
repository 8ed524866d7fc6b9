"""HTML pages about a run: the report and the dashboard.

Pure: the pages are computed only from the evidence passed in.
"""
