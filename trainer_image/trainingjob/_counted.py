"""What counts the samples that it has given out."""

from __future__ import annotations


class Counted:
    samples: int
    """Consumed of the data, by all ranks together."""

    @property
    def digest(self) -> str:
        """Names the data."""
        raise NotImplementedError
