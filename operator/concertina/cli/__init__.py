"""The `concertina` command."""
