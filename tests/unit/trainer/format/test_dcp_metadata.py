"""`.metadata` of torch.distributed.checkpoint: nothing that it names is called, but for what is allowed."""

import enum
import io
import os
import pickle

import pytest
import torch
import torch.distributed.checkpoint as dcp

from concertina_state.errors import InvalidInput
from concertina_state.format.shardfile import Chunk
from concertina_trainer.format.dcp_metadata import parse

WHERE = "s3://b/f/.metadata"


@pytest.fixture
def index(tmp_path):
    """Save a state by torch, and return the bytes of its index."""
    state = {
        "w": torch.arange(12.0).view(3, 4), "bf": torch.ones(2, dtype=torch.bfloat16), "one": torch.tensor(3),
        "train_state": {"step": 5}, "list": [torch.ones(1), {"a": (1, 2)}],
    }  # fmt: skip
    dcp.save(state, checkpoint_id=tmp_path / "f", no_dist=True)
    return (tmp_path / "f" / ".metadata").read_bytes()


def test_what_torch_writes_is_read(index):
    found = parse(index, WHERE)
    assert {piece.chunk for piece in found.pieces} == {
        Chunk("w", "F32", (0, 0), (3, 4), (3, 4)),
        Chunk("bf", "BF16", (0,), (2,), (2,)),
        Chunk("one", "I64", (), (), ()),
        Chunk("list.0", "F32", (0,), (1,), (1,)),
    }
    assert found.values.keys() == {"train_state.step", "list.1.a"}
    assert {piece.location.file for piece in found.pieces} == {"__0_0.distcp"}


class OfPython3110(pickle.Pickler):
    """Pickles members of enums as Python 3.11.0 to 3.11.3 does."""

    def reducer_override(self, value):
        return (getattr, (type(value), value.name)) if isinstance(value, enum.Enum) else NotImplemented


def test_an_index_of_an_older_python_is_read_too(index):
    content = io.BytesIO()
    OfPython3110(content).dump(pickle.loads(index))
    assert b"getattr" in content.getvalue()
    assert parse(content.getvalue(), WHERE) == parse(index, WHERE)


class Calls:
    """Pickled as a call of a function."""

    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


def test_a_call_is_refused_by_name_and_not_made(tmp_path, index):
    for call in (Calls(os.system, f"touch {tmp_path}/called"), Calls(eval, f"open('{tmp_path}/called', 'w')")):
        for text in (pickle.dumps(call), pickle.dumps({"a": [call]}, protocol=0)):
            with pytest.raises(
                InvalidInput, match=r"it names (posix\.system|builtins\.eval|__builtin__\.eval), which no"
            ):
                parse(text, WHERE)
    assert not (tmp_path / "called").exists()
    pickle.loads(pickle.dumps(call))
    assert (tmp_path / "called").exists(), "it would have been made"


@pytest.mark.parametrize("named", [torch.load, torch.nn.Module, torch.float32.__class__, torch.storage.UntypedStorage])
def test_other_names_of_torch_are_refused(named):
    with pytest.raises(InvalidInput, match=r"it names (torch|builtins)"):
        parse(pickle.dumps(named), WHERE)


def test_damage_has_a_sentence(index):
    for text in (b"", index[: len(index) // 2], b"\x80\x04N.", pickle.dumps({"a": 1}), index.replace(b"F", b"\x00")):
        with pytest.raises(InvalidInput, match=r"s3://b/f/\.metadata can't be (used|read)"):
            parse(text, WHERE)


@pytest.mark.parametrize(
    ("before", "after", "sentence"),
    [
        (b"__0_0.distcp", b"../_0.distcp", "which is not in the folder itself"),
        (b"relative_path", b"relative_pat_", "can't be read: KeyError"),
        (b"float32", b"complex", "it names torch.complex"),
    ],
)
def test_an_index_that_was_changed_is_refused(index, before, after, sentence):
    assert before in index
    with pytest.raises(InvalidInput, match=sentence):
        parse(index.replace(before, after), WHERE)


@pytest.mark.parametrize(
    ("part", "whole", "sentence"),
    [
        ((3, 9), (3, 4), "a part of w is beyond the tensor"),
        ((3000, 4000), (3000, 4000), "w has [0-9]+ bytes for a part"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(index, part, whole, sentence):
    metadata = pickle.loads(index)
    tensor = metadata.state_dict_metadata["w"]
    tensor.size, tensor.chunks[0].sizes = torch.Size(whole), torch.Size(part)
    with pytest.raises(InvalidInput, match=sentence):
        parse(pickle.dumps(metadata), WHERE)
