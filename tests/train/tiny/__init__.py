"""A trainer without torch, for tests of the agent: the real channel, real files, a sum in place of a model."""
