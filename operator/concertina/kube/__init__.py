"""Client for the Kubernetes API server, its errors, and its configuration.

No other package sends requests to Kubernetes.
"""
