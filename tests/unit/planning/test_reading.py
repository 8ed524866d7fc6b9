"""Test that the plan names the groups of shards that the ranks of each replica really read."""

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from concertina.planning.layout import ParallelLayout
from concertina.planning.reading import reading
from concertina.planning.traffic import batch
from concertina_data.order import classes
from concertina_trainer.config.parallelism import ParallelismConfig
from concertina_trainer.config.trainer import TrainerConfig
from concertina_trainer.data.batch_order import by_group


def layout(replicas: int, size: int, groups: int = 16, per_node: int = 1, tensor: int = 1) -> ParallelLayout:
    fields = {"data": {"uri": "/data", "groups": groups}, "globalBatchSize": size, "model": {"vocabSize": 32000}}
    parallelism = ParallelismConfig.model_validate({"tensor": tensor})
    return ParallelLayout(TrainerConfig.model_validate(fields), parallelism, replicas * per_node, per_node)


@settings(max_examples=60, deadline=None)
@given(
    replicas=st.integers(1, 9), size=st.integers(1, 60), groups=st.integers(1, 20), per_node=st.sampled_from([1, 2, 4]),
    tensor=st.sampled_from([1, 2]),
)  # fmt: skip
def test_the_groups_are_those_of_the_ranks_of_each_replica(replicas, size, groups, per_node, tensor):
    world = replicas * per_node
    if world % tensor:
        return
    planned = layout(replicas, size, groups, per_node, tensor)
    read = [set() for _ in range(replicas)]
    for start in range(0, size * groups, size):
        found = np.arange(start, start + size) % groups
        found = found[by_group(found, classes(size, groups))]
        for rank in range(world):
            for cut in batch(planned).slices(rank // tensor):
                read[rank // per_node] |= set(found[cut.start : cut.stop].tolist())
    assert reading(planned).groups == tuple(map(len, read))


@pytest.mark.parametrize(
    ("replicas", "size", "groups", "times"),
    [(1, 512, 16, 1), (4, 512, 16, 1), (16, 512, 16, 1), (16, 512, 1, 16), (32, 512, 16, 2), (3, 512, 16, 18 / 16)],
)
def test_replicas_together_read_the_data_about_once(replicas, size, groups, times):
    found = reading(layout(replicas, size, groups))
    assert found.times == pytest.approx(times)
    assert found.rate(1e6) == pytest.approx(2e6 * max(found.groups) / groups)


def test_other_fields_of_an_element_are_read_too():
    """An item of a click stream has an id of a byte and a time of eight."""
    plain = layout(4, 512)
    time = {"name": "time", "type": "int64", "width": 0}
    own = SimpleNamespace(data={"vocab_size": 200, "fields": [time]})
    assert reading(dataclasses.replace(plain, own=own)).element_bytes == 9
    assert reading(plain).element_bytes == 2
