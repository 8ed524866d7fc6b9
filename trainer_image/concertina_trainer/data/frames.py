"""Shards whose elements are frames instead of tokens.

A frame is one vector of features per position, with or without a target.
"""

from __future__ import annotations

import json
import mmap
from typing import Any

import numpy as np
from numpy.typing import NDArray

from concertina_data.data_manifest import FrameFacts, short_digest
from concertina_trainer.data.tokenizer import Tokenizer

FLOATS = {2: "<f2", 4: "<f4"}
"""numpy format of a feature on disk, by its size in bytes."""


def element(frames: FrameFacts) -> np.dtype[Any]:
    """Return the numpy dtype of a frame (a vector of features), including its target if the data set has classes."""
    target = [("target", "<u4")] if frames.classes else []
    return np.dtype([("features", FLOATS[frames.number_bytes], (frames.width,)), *target])


def parts(content: bytes | mmap.mmap, frames: FrameFacts) -> tuple[NDArray[np.floating[Any]], NDArray[Any]]:
    """Return the features `[frames, width]` and the targets `[frames]` of a shard, without a copy."""
    elements = np.frombuffer(content, element(frames))
    targets = elements["target"] if frames.classes else np.broadcast_to(np.uint32(0), len(elements))
    return elements["features"], targets


def as_tokenizer(frames: FrameFacts) -> Tokenizer:
    """Return a Tokenizer that a build can use for documents that already consist of frames (feature vectors)."""
    digest = short_digest(json.dumps([frames.width, frames.number_bytes, frames.classes]).encode())
    return Tokenizer(str(frames), frames.classes, 0, digest, list, frame_bytes=element(frames).itemsize)
