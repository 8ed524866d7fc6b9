"""Connections between agents, and with the operator."""
