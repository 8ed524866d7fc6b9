"""Manifests of the objects that the operator creates, such as pods and Secrets. All functions are pure."""
