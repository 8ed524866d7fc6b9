"""Augmentation of recordings: another loudness, and a little noise.

This module does not import torch, so that the processes that run it start quickly.
"""

from __future__ import annotations

import numpy as np

from concertina_trainer.data.sample import Sample


def louder(sample: Sample, random: np.random.Generator | None) -> Sample:
    """Return the recording with another loudness and noise, or unchanged in an evaluation."""
    if random is not None:
        features = sample.fields["features"]
        noise = 0.02 * random.standard_normal(features.shape)
        sample.fields["features"] = (features * random.uniform(0.8, 1.25) + noise).astype(features.dtype)
    return sample
