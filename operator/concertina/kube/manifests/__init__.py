"""Pods and Secrets as they are made. Pure."""
