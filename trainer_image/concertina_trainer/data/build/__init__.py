"""Building of token shards from text."""
