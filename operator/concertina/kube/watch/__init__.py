"""Background tasks that follow the API server.

They handle the Lease, events, selected namespaces, and, through kopf, TrainingJobs.
"""
