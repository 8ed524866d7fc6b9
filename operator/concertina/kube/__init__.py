"""The only package that talks to Kubernetes: its client, its errors, and how it is reached."""
