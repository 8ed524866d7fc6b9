"""The only package that talks to Kubernetes: its client, its errors, and the access to the API server."""
