"""Test that a checkpoint of any layout has torch's own format.

Its export has the same bits as that of one rank's training.
"""

import json

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

from builders.train import node, states
from concertina_protocol import Restore
from concertina_state.checkpoints.reader import StoredCheckpoint
from concertina_state.objects.prefix import ObjectPrefix
from concertina_trainer.export.export import export

STEPS = 3
DENSE = {
    "fsdp": (3, {}),
    "hsdp": (4, {"shard": 2}),
    "fsdp x tensor": (4, {"tensor": 2}),
    "hsdp x tensor": (4, {"tensor": 2, "shard": 1}),
    "context x tensor": (4, {"context": 2, "tensor": 2}),
    "fsdp x pipeline": (4, {"pipeline": 2}),
    "fsdp x tensor x pipeline": (8, {"pipeline": 2, "tensor": 2}),
    "copies x interleaved": (4, {"pipeline": 2, "schedule": "Interleaved1F1B", "shard": 1}),
}
EXPERTS = {
    "experts x fsdp": (4, {"expert": 2}),
    "experts x copies": (4, {"expert": 2, "shard": 2}),
}
LAW = "tests/train/checkpoints/test_layouts.py::test_a_checkpoint_holds_the_bits_of_one_rank[fsdp x tensor]"


def with_model(trainer, **fields):
    model = {**trainer["model"], "layers": 4, "heads": 4, "kvHeads": 2, "hiddenDim": 44, "vocabSize": 259, **fields}
    return {**trainer, "steps": STEPS, "model": model}


@pytest.fixture(scope="module")
def trained(folder_of_module, parent, trainer):
    """By one rank each: what was trained, and the checkpoint."""
    experts = {"count": 4, "hiddenDim": 24, "scores": "Sigmoid", "shared": 1, "firstDense": 1, "biasRate": 0.01}
    found = {}
    for kind, config in (("dense", with_model(trainer)), ("experts", with_model(trainer, experts=experts))):
        uri = f"file://{folder_of_module}/{kind}-checkpoints"
        [durable] = node.Job(folder_of_module / kind, parent, config, {"uri": uri}).run(1).durable
        found[kind] = config, durable
    return found


def exported(durable, folder):
    export(StoredCheckpoint(durable.uri)).write(ObjectPrefix(str(folder), create=True))
    return {file.name: file.read_bytes() for file in folder.glob("*.safetensors")}


def as_torch_reads(durable):
    """Whole tensors, by nothing of ours."""
    path = durable.uri.removeprefix("file://")
    saved = HuggingFaceStorageReader(path).read_metadata().state_dict_metadata
    whole = {name: torch.full(each.size, torch.nan, dtype=each.properties.dtype) for name, each in saved.items()}
    dcp.load(whole, storage_reader=HuggingFaceStorageReader(path), no_dist=True)
    return whole


@pytest.mark.parametrize(
    "layout",
    [
        layout if layout == "fsdp x tensor" else pytest.param(layout, marks=pytest.mark.long(law=LAW))
        for layout in (*DENSE, *EXPERTS)
    ],
)
def test_a_checkpoint_holds_the_bits_of_one_rank(folder, parent, trained, tmp_path, layout):
    """It takes over what one rank has left, and has nothing more to train."""
    world, parallelism = (DENSE | EXPERTS)[layout]
    config, durable = trained["experts" if layout in EXPERTS else "dense"]
    job = node.Job(folder, parent, config, {"uri": f"file://{tmp_path}/c"})
    job.environment["CONCERTINA_PARALLELISM"] = json.dumps(parallelism)
    outcome = job.run(world, Restore("Storage", STEPS, durable=durable))
    assert outcome.errors == [], outcome.output
    [again] = outcome.durable
    expected, found = states.of_checkpoint(durable.uri), as_torch_reads(again)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name].view(torch.uint8), value.view(torch.uint8)), name
    assert expected["optimizer.exp_avg_sq.blocks.1.attention.query.weight"].any()
    assert exported(again, tmp_path / "again") == exported(durable, tmp_path / "alone")
