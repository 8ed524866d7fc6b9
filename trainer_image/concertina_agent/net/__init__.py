"""Connections of agents with each other and with the operator."""
