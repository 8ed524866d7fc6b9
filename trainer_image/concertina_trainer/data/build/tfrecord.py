"""Reader of TFRecord files of `tf.train.Example`, without TensorFlow.

A record consists of its length (uint64), the length's checksum, the content, and the content's checksum. A checksum is
a masked CRC-32C (https://www.tensorflow.org/tutorials/load_data/tfrecord). The content is parsed by protobuf
(decision "TFRecord is read without TensorFlow").
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Collection, Iterator
from typing import Any, BinaryIO

import google_crc32c
import numpy as np
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError

from concertina_state.errors import InvalidInput
from concertina_trainer.data.build.records import MOST_BYTES, Record

_HEAD, _TAIL = struct.Struct("<QI"), struct.Struct("<I")


def read_examples(location: str, file: BinaryIO, columns: Collection[str]) -> Iterator[Record]:
    """Yield the examples of a file, with the features in `columns`.

    Raises:
        InvalidInput: When the file is damaged or cut off, or a record is no `tf.train.Example`.
    """
    number = 0
    while head := file.read(_HEAD.size):
        number += 1
        where = f"{location}, record {number}"
        try:
            example = _example_type().FromString(_content(file, head, where))
        except DecodeError as error:
            raise InvalidInput(f"{where} is not a tf.train.Example: write the records as examples.") from error
        features = example.features.feature
        values = {name: _value(features[name]) if name in columns else None for name in sorted(features)}
        yield Record(values, functools.partial(str, where))


def _content(file: BinaryIO, head: bytes, where: str) -> bytes:
    """Return the content of the record that begins with `head`.

    Raises:
        InvalidInput: When the record is cut off, damaged or too large.
    """
    if len(head) < _HEAD.size:
        raise InvalidInput(f"{where} is cut off: restore the file.")
    length, checksum = _HEAD.unpack(head)
    if checksum != masked_checksum(head[:8]):
        raise InvalidInput(
            f"{where} is damaged, because its length does not match its checksum: restore the file. A compressed "
            "file needs a name that ends in .gz."
        )
    if length > MOST_BYTES:
        raise InvalidInput(f"{where} has {length} bytes, and at most {MOST_BYTES} are read: write smaller records.")
    content, tail = file.read(length), file.read(_TAIL.size)
    if len(tail) < _TAIL.size:
        raise InvalidInput(f"{where} is cut off: restore the file.")
    if _TAIL.unpack(tail)[0] != masked_checksum(content):
        raise InvalidInput(f"{where} is damaged, because its content does not match its checksum: restore the file.")
    return content


def masked_checksum(content: bytes) -> int:
    """Return the CRC-32C of `content`, masked as in TensorFlow's `crc32c.h`."""
    crc: int = google_crc32c.value(content)
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def _value(feature: Any) -> object:
    """Return a feature as bytes, or as an array of numbers. Several byte strings are a list."""
    kind = feature.WhichOneof("kind")
    if kind is None:
        return None
    value = getattr(feature, kind).value
    if kind == "bytes_list":
        return value[0] if len(value) == 1 else list(value)
    return np.array(value, np.int64 if kind == "int64_list" else np.float32)


@functools.cache
def _example_type() -> Any:
    """Return the class of `tf.train.Example`, whose definition is tensorflow/core/example/example.proto.

    The class is in a pool of its own, because TensorFlow may have defined the same name.
    """
    fields = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(name="example.proto", package="tensorflow", syntax="proto3")

    def message(name: str, *members: descriptor_pb2.FieldDescriptorProto) -> descriptor_pb2.DescriptorProto:
        return file.message_type.add(name=name, field=members)

    def member(name: str, number: int, kind: int, type_name: str = "", **more: Any) -> Any:
        label = more.pop("label", fields.LABEL_OPTIONAL)
        return fields(name=name, number=number, type=kind, type_name=type_name or None, label=label, **more)

    for name, kind in (("Bytes", fields.TYPE_BYTES), ("Float", fields.TYPE_FLOAT), ("Int64", fields.TYPE_INT64)):
        message(f"{name}List", member("value", 1, kind, label=fields.LABEL_REPEATED))
    kinds = ("Bytes", "Float", "Int64")
    lists = [
        member(f"{name.lower()}_list", number, fields.TYPE_MESSAGE, f".tensorflow.{name}List", oneof_index=0)
        for number, name in enumerate(kinds, 1)
    ]
    message("Feature", *lists).oneof_decl.add(name="kind")
    entries = ".tensorflow.Features.FeatureEntry"
    features = message("Features", member("feature", 1, fields.TYPE_MESSAGE, entries, label=fields.LABEL_REPEATED))
    pair = (member("key", 1, fields.TYPE_STRING), member("value", 2, fields.TYPE_MESSAGE, ".tensorflow.Feature"))
    features.nested_type.add(name="FeatureEntry", field=pair).options.map_entry = True
    message("Example", member("features", 1, fields.TYPE_MESSAGE, ".tensorflow.Features"))
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("tensorflow.Example"))
