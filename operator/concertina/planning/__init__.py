"""What a layout costs and brings before anything runs: bytes, seconds, money. Pure, and without torch."""
