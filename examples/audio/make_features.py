"""Synthetic recordings like those of an encoder: python make_features.py FOLDER [RECORDINGS]

Each recording is a random walk through a few states. A frame is its state's spectrum with noise, and its target is the
state.
"""

import sys
from pathlib import Path

import numpy as np

WIDTH, STATES = 20, 8


def main(folder: Path, recordings: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    spectra = np.random.default_rng(0).normal(size=(STATES, WIDTH))
    for number in range(recordings):
        random = np.random.default_rng(number + 1)
        steps = random.integers(2, 9, size=60)
        states = np.repeat(np.cumsum(random.integers(1, 4, size=60)) % STATES, steps)
        features = spectra[states] + 0.1 * random.normal(size=(len(states), WIDTH))
        np.savez(folder / f"{number:05}.npz", features=features.astype(np.float16), targets=states.astype(np.uint16))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 200)
