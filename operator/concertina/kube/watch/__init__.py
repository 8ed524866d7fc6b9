"""Background tasks that use the API server for the whole life of the operator.

They maintain the Lease, write events, and watch the selected namespaces and, with kopf, TrainingJobs.
"""
