"""Documents that are arrays of frames. A frame is the vector of features at one position.

The files are .npy files `[frames, width]`, and .npz files of `features` and `targets`.
"""

from __future__ import annotations

import io
import zipfile
from typing import Any

import numpy as np
from numpy.typing import NDArray

from concertina_data.data_manifest import FrameFacts
from concertina_state.errors import InvalidInput
from concertina_trainer.data.build.content import container_of
from concertina_trainer.data.build.file_names import FRAMES
from concertina_trainer.data.build.sources import DataSource
from concertina_trainer.data.frames import element
from concertina_trainer.data.rangefile import open_range

_OWN_CONTAINERS = ("a NumPy array", "a zip archive")
"""Names of the file formats that .npy and .npz files have, as found by `content.container_of`."""
Arrays = tuple[NDArray[np.floating[Any]], NDArray[np.integer[Any]] | None]


def facts(sources: list[DataSource], classes: int) -> FrameFacts | None:
    """Return the format of the frames (feature vectors), taken from the first file, or None if the files are text.

    Targets must be less than `classes`. If `classes` is 0, the files must not contain targets.

    Raises:
        InvalidInput: When some files are text and others arrays, or `classes` does not fit the first file.
    """
    kinds = {source.format == FRAMES for source in sources}
    if len(kinds) > 1:
        raise InvalidInput(
            "some of the files are arrays of frames, and others are text: choose one kind with --pattern."
        )
    if kinds == {False}:
        if classes:
            raise InvalidInput(
                "--classes applies only to the targets of .npz files, and these files are text: leave --classes out."
            )
        return None
    features, targets = _arrays(sources[0])
    if targets is not None and not classes:
        raise InvalidInput(f"{sources[0].location} has targets: give the number of classes with --classes.")
    return FrameFacts(features.shape[1], features.dtype.itemsize, classes)


def document(source: DataSource, frames: FrameFacts) -> bytes:
    """Return the frames (feature vectors) of a file as bytes, in the format of the data set.

    Raises:
        InvalidInput: When the file's format differs from `frames`, or the file has invalid numbers.
    """
    features, targets = _arrays(source)
    if (features.shape[1], features.dtype.itemsize) != (frames.width, frames.number_bytes):
        raise InvalidInput(
            f"{source.location} has frames of {features.dtype} x {features.shape[1]}, and the first file "
            f"has {frames}: all files must have the same type and width."
        )
    if not np.isfinite(features).all():
        raise InvalidInput(f"{source.location} has features that are not finite: correct the values.")
    elements = np.empty(len(features), element(frames))
    elements["features"] = features
    if frames.classes:
        if targets is None:
            raise InvalidInput(
                f"{source.location} has no targets, and --classes is {frames.classes}: add "
                "targets, or leave --classes out."
            )
        if len(targets) and not 0 <= int(targets.min()) <= int(targets.max()) < frames.classes:
            raise InvalidInput(
                f"{source.location} has targets from {targets.min()} to {targets.max()}: they must be from "
                f"0 to {frames.classes - 1}."
            )
        elements["target"] = targets
    return elements.tobytes()


def _why_unreadable(whole: bytes, error: Exception) -> str:
    container = container_of(whole)
    if container and container not in _OWN_CONTAINERS:
        return f"it holds {container}"
    if "pickle" in str(error):  # NumPy's own message advises to allow pickle, which would run code from the file
        return "it is not an array of numbers"
    return str(error)[:300].rstrip(".")


def _arrays(source: DataSource) -> Arrays:
    with open_range(source.location, source.size) as file:
        whole = file.read()
    try:
        loaded = np.load(io.BytesIO(whole), allow_pickle=False)
        features = loaded if isinstance(loaded, np.ndarray) else loaded["features"]
        targets = None if isinstance(loaded, np.ndarray) else loaded["targets"]
    except (ValueError, KeyError, EOFError, OSError, zipfile.BadZipFile) as error:
        raise InvalidInput(f"{source.location} can't be read: {_why_unreadable(whole, error)}.") from error
    if features.ndim != 2 or not features.shape[1] or features.dtype not in (np.float16, np.float32):
        raise InvalidInput(
            f"{source.location} has features of shape {list(features.shape)}, {features.dtype}: they must "
            "be [frames, width] of float16 or float32."
        )
    if targets is not None and (targets.shape != features.shape[:1] or targets.dtype.kind not in "iu"):
        raise InvalidInput(
            f"{source.location} has targets of shape {list(targets.shape)}, {targets.dtype}: it needs one "
            f"integer for each of {len(features)} frames."
        )
    return features, targets
