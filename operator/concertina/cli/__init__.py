"""The concertina command."""
