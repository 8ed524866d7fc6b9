"""Manifests of the pods and Secrets that the operator creates. Pure."""
