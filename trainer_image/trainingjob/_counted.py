"""The count of samples that a data iterator has delivered."""

from __future__ import annotations


class SampleCounter:
    """Data iterator that counts the samples that it has delivered. `State` reports the count to the job."""

    samples: int
    """Samples consumed by all ranks together since the run began."""

    @property
    def digest(self) -> str:
        """Digest of the training data, which identifies their content."""
        raise NotImplementedError
