"""Records of a run for a tracking tool, such as MLflow.

The coordinator's agent writes the records, and its tracking process sends them to the tool.
"""
