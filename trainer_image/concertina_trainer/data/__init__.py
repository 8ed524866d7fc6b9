"""Training data: token shards under a manifest, their order as a pure function, and their reader."""
