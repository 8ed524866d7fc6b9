"""Trainer without torch, for tests of agent and operator: the real channel, real files, a sum instead of a model."""
