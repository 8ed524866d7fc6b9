"""The only package that talks to Kubernetes."""
