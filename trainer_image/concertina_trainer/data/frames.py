"""Frames of features, and their targets, as elements of shards: what tokens are of text."""

from __future__ import annotations

import json
import mmap
from typing import Any

import numpy as np
from numpy.typing import NDArray

from concertina_data.data_manifest import FrameFacts, short_digest
from concertina_trainer.data.tokenizer import Tokenizer

FLOATS = {2: "<f2", 4: "<f4"}
"""How numbers lie on disk, by their bytes."""


def element(frames: FrameFacts) -> np.dtype[Any]:
    """A frame, and its target where there are classes."""
    target = [("target", "<u4")] if frames.classes else []
    return np.dtype([("features", FLOATS[frames.number_bytes], (frames.width,)), *target])


def parts(content: bytes | mmap.mmap, frames: FrameFacts) -> tuple[NDArray[np.floating[Any]], NDArray[Any]]:
    """Features [frames, width] and targets of a shard, in place."""
    found = np.frombuffer(content, element(frames))
    targets = found["target"] if frames.classes else np.broadcast_to(np.uint32(0), len(found))
    return found["features"], targets


def as_tokenizer(frames: FrameFacts) -> Tokenizer:
    """Of documents that are elements already: what a build asks of a tokenizer."""
    digest = short_digest(json.dumps([frames.width, frames.number_bytes, frames.classes]).encode())
    return Tokenizer(str(frames), frames.classes, 0, digest, list, frame_bytes=element(frames).itemsize)
