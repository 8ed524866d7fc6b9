"""Synthetic tracks of embeddings: python make_embeddings.py FILE.parquet [TRACKS]

A track is a list of vectors that turn on a circle, such as the embeddings of the frames of a video. The speed of a
track stays the same, so the next vector follows from the last two.
"""

import sys
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet as parquet

WIDTH = 16


def track(number: int, plane: np.ndarray) -> list[list[float]]:
    chance = np.random.default_rng(number)
    angles = chance.uniform(0, 2 * np.pi) + chance.uniform(0.2, 1.2) * np.arange(chance.integers(10, 60))
    vectors: list[list[float]] = (np.stack([np.cos(angles), np.sin(angles)], axis=1) @ plane).tolist()
    return vectors


def main(file: Path, tracks: int) -> None:
    plane = np.random.default_rng(0).standard_normal((2, WIDTH))
    table = pyarrow.table({"embedding": [track(number, plane) for number in range(1, tracks + 1)]})
    parquet.write_table(table, file)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 2000)
