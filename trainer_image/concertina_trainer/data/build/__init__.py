"""Building of a data set: documents become shards of tokens with a manifest."""
