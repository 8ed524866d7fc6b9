"""NumPy files that are damaged, or made to do harm: each is refused by name, and none is believed about its size."""

import io
import struct
import zipfile

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from concertina_state.errors import InvalidInput
from concertina_trainer.data.build.arrays import read_arrays
from concertina_trainer.data.build.records import UnreadArray

FINE = np.arange(12, dtype=np.int32).reshape(3, 4)


def npy(array=FINE):
    made = io.BytesIO()
    np.save(made, array)
    return made.getvalue()


def headed(header, content=b"", version=1):
    kind = "<H" if version == 1 else "<I"
    return b"\x93NUMPY" + bytes([version, 0]) + struct.pack(kind, len(header)) + header + content


def described(shape, kind="'<i4'", content=b""):
    return headed(f"{{'descr': {kind}, 'fortran_order': False, 'shape': {shape}}}\n".encode(), content)


def npz(members, method=zipfile.ZIP_STORED):
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w", method) as archive:
        for name, content in members:
            archive.writestr(name, content)
    return made.getvalue()


def with_method(content, method):
    """Return an archive whose member claims to be compressed in another way."""
    entry = content.index(b"PK\x01\x02")
    return content[:8] + bytes([method]) + content[9 : entry + 10] + bytes([method]) + content[entry + 11 :]


def read(content, *columns):
    [record] = read_arrays("a.npz", io.BytesIO(content), columns)
    return record.values


@pytest.mark.parametrize("array", [FINE, np.asfortranarray(FINE), FINE[:0], FINE.astype(">f8"), FINE > 3])
def test_arrays_are_read_as_numpy_reads_them(array):
    found = read(npy(array), "features")["features"]
    assert found.dtype == array.dtype
    assert found.tolist() == array.tolist()


def test_only_the_arrays_of_columns_are_read_from_an_archive():
    content = npz([("a.npy", npy()), ("b.npy", b"no array"), ("c.txt", b"text")], zipfile.ZIP_DEFLATED)
    found = read(content, "a")
    assert found["a"].tolist() == FINE.tolist()
    assert [found["b"], found["c.txt"]] == [None, None]


def test_what_lies_beside_the_arrays_does_not_hide_that_a_column_is_missing():
    beside = [("a.npy", npy()), ("rate.npy", npy(np.int32(16000))), ("b.npy", b"no array"), ("c.txt", b"text")]
    found = read(npz(beside), "features")
    assert "features" not in found
    assert found["a"] == UnreadArray((3, 4), FINE.dtype)
    assert [found["rate"], found["b"], found["c.txt"]] == [None] * 3


HOSTILE = {
    "objects": (npy(np.array([{}], object)), "it is not an array of numbers"),
    "a shape without the content": (described((2**20, 200), content=b"1"), "it is cut off"),
    "more bytes than any memory": (described((10**15,)), "at most 1073741824 are read"),
    "more numbers than 64 bits count": (described((2**62, 2**62)), "at most 1073741824 are read"),
    "a negative shape": (described((-1, 4)), "it is not an array of numbers"),
    "a single number": (npy(np.int32(3)), "it is not an array of numbers"),
    "a shape that is text": (described("'3'"), "shape is not valid"),
    "a type that is none": (described((3,), "'nothing'"), "nothing"),
    "numbers of no bytes": (described((10**18,), "'V0'"), "it is not an array of numbers"),
    "a header of 4 GiB": (headed(b"", version=2)[:8] + b"\xff\xff\xff\xff" + bytes(20000), "EOF: reading array header"),
    "a long header": (headed(b"{" + b" " * 12000 + b"}"), "Header info length"),
    "a header that is no Python": (headed(b"{'descr': '<i4', "), ""),
    "a deep header": (headed(b"(" * 9000), ""),
    "a header that takes the parser's memory": (headed(b"-" * 9000 + b"1"), "its header can't be read"),
    "records with names in Unicode": (headed(b"", version=3), "it is not an array of numbers"),
    "two arrays": (npy() + npy(), "it continues after its array"),
    "an archive that is cut off": (npz([("features.npy", npy())])[:-30], "zip"),
    "an array twice": (npz([("features.npy", npy()), ("features", npy())]), "two arrays of the same name"),
    "an unknown compression": (with_method(npz([("features.npy", npy())]), 99), "compression"),
    "a bomb": (npz([("features.npy", described((2**29,)) + bytes(2**25))], zipfile.ZIP_DEFLATED), "at most"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_what_would_do_harm_is_refused(name):
    content, said = HOSTILE[name]
    with pytest.raises(InvalidInput, match=f"a.npz can't be read: .*{said}"):
        read(content, "features")


@settings(deadline=None, max_examples=300)
@given(where=st.integers(0, 400), changed=st.binary(min_size=1, max_size=6), is_zip=st.booleans())
@pytest.mark.filterwarnings("ignore")
def test_changed_bytes_are_refused_or_give_an_array(where, changed, is_zip):
    content = bytearray(npz([("features.npy", npy())], zipfile.ZIP_DEFLATED) if is_zip else npy())
    content[where % len(content) : where % len(content) + len(changed)] = changed
    try:
        values = read(bytes(content), "features")
    except InvalidInput:
        return
    assert all(value is None or isinstance(value, np.ndarray) for value in values.values())
