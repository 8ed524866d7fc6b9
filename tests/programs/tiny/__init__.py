"""A trainer without torch, for tests of agent and operator: the real channel, real files, a sum in place of a model."""
