"""Connections of the agent with other agents and the operator."""
