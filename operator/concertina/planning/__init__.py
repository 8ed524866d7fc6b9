"""Cost and performance of a layout before anything runs: bytes, seconds, money. Pure, and without torch."""
