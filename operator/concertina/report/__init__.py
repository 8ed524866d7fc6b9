"""HTML pages about a run: the report and the dashboard. Pure: they are computed from evidence that is passed in."""
