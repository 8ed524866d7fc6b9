"""Background tasks that follow the API server:

the Lease, events, selected namespaces, and TrainingJobs through kopf.
"""
