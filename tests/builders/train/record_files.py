"""Content of WebDataset archives and of TFRecord files."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from tensorboard.summary.writer.record_writer import RecordWriter

from concertina_trainer.data.build.tfrecord import _example_type


def archive(members: Iterable[tuple[str, bytes]], **options: Any) -> bytes:
    """Return a tar archive of members by name, written by the standard library."""
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w", **options) as file:
        for name, content in members:
            member = tarfile.TarInfo(name)
            member.size = len(content)
            file.addfile(member, io.BytesIO(content))
    return made.getvalue()


def npy(values: Any, dtype: Any = None) -> bytes:
    """Return the content of an .npy file."""
    made = io.BytesIO()
    np.save(made, np.asarray(values, dtype))
    return made.getvalue()


def records(contents: Iterable[bytes]) -> bytes:
    """Return a TFRecord file of these contents, written by TensorBoard."""
    made = io.BytesIO()
    made.close, close = lambda: None, made.close  # type: ignore[method-assign]
    writer = RecordWriter(made)
    for content in contents:
        writer.write(content)
    writer.flush()
    whole = made.getvalue()
    close()
    return whole


def example(values: Mapping[str, Any]) -> bytes:
    """Return a tf.train.Example of byte strings, whole numbers and floats."""
    made = _example_type()()
    for name, value in values.items():
        feature = made.features.feature[name]
        if isinstance(value, bytes):
            feature.bytes_list.value.append(value)
        elif np.asarray(value).dtype.kind == "f":
            feature.float_list.value.extend(np.asarray(value).ravel().tolist())
        else:
            feature.int64_list.value.extend(value)
    return made.SerializeToString()  # type: ignore[no-any-return]
