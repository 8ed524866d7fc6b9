"""Shards of tokens, made from text."""
