"""Transforms of samples: one that draws, and those that a trainer refuses."""

import os
import subprocess

import numpy as np

from concertina_trainer.data.sample import Sample


def drawn(sample, random):
    """Replace every number by one that is drawn, and print, as a user's code may."""
    print("transforming")
    if random is None:
        sample.tokens[:] = 299
        return sample
    time = sample.fields["time"] + random.integers(0, 1000, sample.tokens.shape)
    tokens = random.integers(0, 300, sample.tokens.shape)
    return Sample(tokens, {"time": time, "place": random.standard_normal(sample.fields["place"].shape)}, 0)


def fails(sample, random):
    raise KeyError(f"no {len(sample.tokens)}")


def nothing(sample, random):
    pass


def shorter(sample, random):
    sample.tokens = sample.tokens[:-1]
    return sample


def floats(sample, random):
    sample.fields["time"] = sample.fields["time"] / 2
    return sample


def without_time(sample, random):
    del sample.fields["time"]
    return sample


def infinite(sample, random):
    sample.fields["place"] = sample.fields["place"] + np.inf
    return sample


def beyond(sample, random):
    sample.tokens = sample.tokens + 300
    return sample


def dies(sample, random):
    os._exit(3)


def without_fields(sample, random):
    return Sample(sample.tokens, None, sample.position)


def unsigned(sample, random):
    sample.fields["time"] = np.full(sample.tokens.shape, 2**64 - 1, np.uint64)
    return sample


def starts_cat(sample, random):
    """Start a program that reads its standard input to the end."""
    subprocess.run(["cat"], check=True)
    return sample


def process(sample, random):
    """Replace the times by the number of the process."""
    sample.fields["time"] = np.full_like(sample.fields["time"], os.getpid())
    return sample
