"""Diagnosis of a run from its status, metrics and logs. Pure: it reads nothing itself."""
