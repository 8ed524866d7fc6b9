"""The status that a pass writes."""
