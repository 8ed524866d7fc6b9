"""Test a table of small scripts as users write them.

All ranks of a script are killed in the middle. The script then starts again in a world of the same size and in one of
another size. What it restores must be equal to what was saved, to the bit. In the same world it must end like an
uninterrupted run, or be refused by name. In another world, the case names the differences, and everything else must be
equal.
"""

from __future__ import annotations

import dataclasses
import os
import re
import sys
from collections.abc import Callable
from importlib.machinery import PathFinder
from typing import Any

import pytest

from builders.train import killed
from builders.train.killed import Agents, Start
from builders.train.killed_cases import (
    Case,
    Differs,
    Equal,
    Refused,
    check,
    check_refused,
    killed_and_started_again,
)
from concertina_protocol import BAD_INPUTS

pytestmark = pytest.mark.timeout(200)


def every(micro_batches: int) -> Callable[[int], int]:
    """Only what an optimizer step has finished is saved."""
    return lambda commits: commits // micro_batches * micro_batches


def ends_of_epochs(commits: int) -> int:
    """Accelerate makes a step after four batches, and at the end of an epoch of five."""
    return commits // 5 * 5 + (4 if commits % 5 == 4 else 0)


def framework(script: str, **more: Any) -> Case:
    """Its loop knows its place once it has begun, and its log has times in it."""
    not_compared = ("*loops.*", "*loader0.*", "*progress.log_history*")
    return Case(script, not_compared=not_compared, **more)


def loader(script: str, **more: Any) -> Case:
    """Return the case of a script with a StatefulDataLoader, which has a position only after its loop has begun."""
    # Not killed at the end of a pass: in another world torchdata's loader raises StopIteration then.
    return Case(script, package="torchdata", not_compared=("*loader.*",), other=POSITIONS, **more)


ALL = ("step.*", "end.*")
DROPOUT = Differs("each rank draws a dropout of its own", ALL)
SHARE = Differs("a batch norm's batch is a rank's share of it", ALL)
BUCKETS = Equal(1e-4, "DDP lays out its buckets anew after the first step, and sums of more than two are rounded")
POSITIONS = Differs("a StatefulDataLoader continues in a world of the same size only", ("items", *ALL))
ALONE: tuple[int, ...] = ()

CASES = [
    Case("models:gan"),
    Case("models:gan_with_rare_critic", sibling="models:gan", saved=lambda commits: (commits - 1) // 3 * 3 + 1),
    Case("models:ema"),
    Case("models:teacher", sibling="models:ema"),
    Case("models:swa", sibling="models:ema", other=SHARE),
    Case("models:compiled", other=DROPOUT),
    Case("models:tied_ddp", sibling="models:gan"),
    Case("models:tied_fsdp2", sibling="models:tied_ddp"),
    Case("models:sparse"),
    Case("models:few_rows", others=(4, 3, 1)),
    Case("models:fsdp1", sibling="models:few_rows"),
    Case("models:hybrid", sibling="models:few_rows", first=4, others=(2,)),
    Case("models:tensor_parallel", first=4, others=(2,)),
    Case("models:tensor_parallel_with_dropout", sibling="models:tensor_parallel", first=4, others=(2,), other=DROPOUT),
    Case("models:normed", sibling="models:gan"),
    Case("models:checkpointed", sibling="models:compiled", other=DROPOUT),
    Case("models:lazy", sibling="models:gan"),
    Case("models:recurrent", sibling="models:gan", other=Equal(1e-4, "each step of a recurrence rounds again")),
    Case("accumulation:by_step", sibling="accumulation:by_micro_batch"),
    Case("accumulation:by_micro_batch", kill=6, kills=(5, 7, 8), saved=every(4)),
    Case(
        "accumulation:zeroed_first",
        sibling="accumulation:by_micro_batch",
        kill=6,
        kills=(5, 7, 8),
        saved=every(4),
    ),
    Case("accumulation:scaled", sibling="models:gan", other=Equal(1e-2, "autocast multiplies in bfloat16")),
    Case(
        "accumulation:overflowing",
        sibling="accumulation:by_micro_batch",
        kill=6,
        saved=lambda commits: 4 if commits in (5, 6) else commits,
    ),
    Case(
        "accumulation:uneven",
        sibling="accumulation:by_micro_batch",
        first=1,
        others=ALONE,
        kill=8,
        kills=(9,),
        saved=lambda commits: {8: 5}.get(commits, commits),
    ),
    Case("accumulation:closure", sibling="models:gan"),
    Case("buffers:batch_norm", first=4, others=(2, 5), same=BUCKETS, other=SHARE),
    Case("buffers:batch_norm_of_each_rank", sibling="buffers:batch_norm", others=(3, 1), other=SHARE),
    Case("buffers:synchronized", sibling="buffers:counting"),  # torch's SyncBatchNorm: tests/gpu/test_loops.py
    Case("buffers:queue", other=Differs("each rank has a queue of its own", ALL)),
    Case("buffers:counting"),
    Case("buffers:carried_as_part", sibling="buffers:counting"),
    Case(
        "buffers:carried_in_dict",
        sibling="refused:unsaveable_value",
        same=Refused(r"memory\.hidden"),
        other=Refused(r"memory\.hidden"),
    ),
    Case("buffers:carried_by_object", sibling="buffers:carried_as_part", others=ALONE),
    Case("optimizers:lbfgs", sibling="optimizers:every_optimizer", first=1, others=(2,)),
    Case("optimizers:muon", sibling="optimizers:every_optimizer", other=Equal(0.1, "Muon multiplies in bfloat16")),
    Case("optimizers:every_optimizer"),
    Case("optimizers:every_scheduler", sibling="optimizers:lbfgs", first=1, others=(2,)),
    Case("optimizers:unfrozen_by_progress"),
    Case("optimizers:unfrozen_at_once", sibling="optimizers:unfrozen_by_progress", kills=(9,)),
    Case(
        "optimizers:unfrozen_too_late",
        sibling="optimizers:parameter_moved",
        same=Refused("add_param_group"),
        other=Refused("add_param_group"),
    ),
    Case("optimizers:groups_in_another_order", sibling="optimizers:every_optimizer"),
    Case("optimizers:parameters_in_another_order", sibling="optimizers:groups_in_another_order"),
    Case("optimizers:group_split", sibling="optimizers:groups_in_another_order"),
    Case(
        "optimizers:groups_merged",
        sibling="optimizers:parameter_moved",
        same=Refused("0.weight|0.bias"),
        other=Refused("0.weight|0.bias"),
    ),
    Case("optimizers:parameter_moved", same=Refused("weight|bias"), other=Refused("weight|bias")),
    Case(
        "optimizers:parameter_left_out",
        sibling="optimizers:parameter_moved",
        same=Refused("2.bias"),
        other=Refused("2.bias"),
    ),
    Case("optimizers:made_before_conversion", sibling="models:gan"),
    Case("optimizers:replaced", sibling="optimizers:grown_by_progress", first=1, others=ALONE),
    Case("optimizers:grown_by_progress", sibling="optimizers:unfrozen_by_progress", first=1, others=ALONE),
    Case(
        "optimizers:grown_too_late",
        sibling="optimizers:unfrozen_too_late",
        first=1,
        others=ALONE,
        same=Refused("add_param_group|3.weight|3.bias"),
    ),
    Case("optimizers:lookahead", sibling="objects:own_objects"),
    Case("optimizers:own_optimizer", sibling="optimizers:every_optimizer"),
    Case("optimizers:without_names", sibling="optimizers:every_optimizer"),
    Case("objects:own_objects"),
    Case("objects:metrics", sibling="objects:own_objects"),
    Case("objects:random_numbers", sibling="models:compiled", other=DROPOUT),
    Case("objects:dtypes", sibling="objects:own_objects"),
    Case("objects:half", sibling="objects:dtypes", first=1, others=ALONE),
    Case(
        "objects:complex_numbers", sibling="refused:unsaveable_value", first=1, others=ALONE, same=Refused(r"complex")
    ),
    Case("objects:views", sibling="objects:own_objects"),
    Case("objects:channels_last", sibling="objects:views"),
    Case("objects:numpy_arrays", sibling="objects:own_objects"),
    Case("objects:growing_values", sibling="objects:metrics", first=1, others=ALONE),
    Case("objects:replay_buffer", sibling="refused:unsaveable_value", first=1, others=ALONE, same=Refused(r"replay/0")),
    Case(
        "objects:numbers_of_each_rank",
        sibling="buffers:queue",
        other=Differs("each rank has values of its own", ("end.kept.*",)),
    ),
    Case("subclasses:eight_bit_moments"),
    Case(
        "subclasses:torchao_moments",
        sibling="subclasses:eight_bit_moments",
        package="torchao",
        other=Equal(0.01, "moments are rounded to 8 bits"),
    ),
    Case("subclasses:eight_bit_weights", sibling="subclasses:eight_bit_moments", first=1, others=ALONE),
    Case(
        "subclasses:eight_bit_in_dict",
        sibling="subclasses:opaque_weight",
        first=1,
        others=ALONE,
        same=Refused(r"kept\.average.*Quantized"),
    ),
    Case("subclasses:opaque_weight", first=1, others=ALONE, same=Refused(r"model\.secret.*Opaque")),
    Case(
        "subclasses:opaque_moments",
        sibling="subclasses:opaque_weight",
        first=1,
        others=ALONE,
        same=Refused(r"optimizer.*Opaque"),
    ),
    Case("subclasses:named", sibling="subclasses:eight_bit_moments", first=1, others=ALONE),
    Case(
        "subclasses:sparse_in_dict",
        sibling="subclasses:opaque_weight",
        first=1,
        others=ALONE,
        same=Refused(r"kept\.graph.*sparse"),
    ),
    Case(
        "subclasses:on_meta",
        sibling="subclasses:opaque_weight",
        first=1,
        others=ALONE,
        same=Refused(r"model\.table.*meta"),
    ),
    Case(
        "subclasses:quantized_by_torch",
        sibling="subclasses:opaque_weight",
        first=1,
        others=ALONE,
        same=Refused(r"kept\.codes"),
    ),
    Case("refused:two_states", same=Refused("already has a State"), other=Refused("already has a State")),
    Case(
        "refused:two_states_in_two_folders",
        sibling="refused:two_states",
        same=Refused("already has a State"),
        other=Refused("already has a State"),
    ),
    Case("refused:object_added", same=Refused("scheduler"), other=Refused("scheduler")),
    Case(
        "refused:object_left_out", sibling="refused:object_added", same=Refused("scheduler"), other=Refused("scheduler")
    ),
    Case(
        "refused:layer_left_out", sibling="refused:object_added", first=1, others=ALONE, same=Refused(r"model\.middle")
    ),
    Case("refused:layer_added", sibling="refused:object_added", first=1, others=ALONE, same=Refused(r"model\.\d")),
    Case(
        "refused:buffer_left_out",
        sibling="refused:layer_left_out",
        same=Refused(r"model\.1\."),
        other=Refused(r"model\.1\."),
    ),
    Case(
        "refused:another_width", sibling="refused:another_type", same=Refused(r"model\.0"), other=Refused(r"model\.0")
    ),
    Case("refused:another_type", first=1, others=ALONE, same=Refused(r"model\.0")),
    Case(
        "refused:another_optimizer",
        sibling="refused:another_type",
        same=Refused("optimizer"),
        other=Refused("optimizer"),
    ),
    Case(
        "refused:other_optimizer_steps",
        sibling="refused:another_type",
        first=1,
        others=ALONE,
        same=Refused("optimizer that makes the steps"),
        kill=11,
    ),
    Case(
        "refused:parameters_differ",
        sibling="refused:another_type",
        same=Refused(r"model\.weight"),
        other=Refused(r"model\.weight"),
    ),
    Case(
        "refused:moments_differ",
        sibling="refused:parameters_differ",
        same=Refused(r"optimizer.*exp_avg"),
        other=Refused(r"optimizer.*exp_avg"),
    ),
    Case("refused:unsaveable_value", first=1, others=ALONE, same=Refused(r"kept\.function")),
    Case("data:distributed", kills=(1, 8)),
    Case("data:distributed_with_workers", sibling="data:distributed"),
    Case("data:shuffled", first=1, others=ALONE),
    Case("data:shuffled_by_generator", sibling="data:shuffled", first=1, others=ALONE),
    # A pass left early just before a kill, with the epoch counted on already, is refused: see docs/limitations.md.
    Case("data:left_early", sibling="data:distributed", kills=(1,)),
    Case("data:in_order", sibling="data:shuffled", first=1, others=ALONE),
    loader("stateful_data:distributed"),
    loader("stateful_data:distributed_with_workers", sibling="stateful_data:distributed"),
    loader("stateful_data:streamed", sibling="stateful_data:distributed"),
    Case("devices:mixed", sibling="models:sparse"),  # all on the CPU, and with a GPU in tests/gpu/test_loops.py
    Case("without_torch:train", parent="loops.preload_numpy"),
    Case("with_jax:train", sibling="without_torch:train", parent="loops.preload_numpy", package="jax"),
    framework("frameworks:lightning_gan", first=1, others=ALONE, kills=(1, 3), saved=lambda commits: 2 * commits),
    framework("frameworks:lightning_accumulation", sibling="frameworks:lightning_gan", first=1, others=ALONE),
    framework("frameworks:trainer", sibling="frameworks:accelerated", first=1, others=ALONE),
    framework("frameworks:accelerated", kill=8, kills=(5, 6, 7), saved=ends_of_epochs),
    framework(
        "frameworks:accelerated_with_dropout",
        sibling="frameworks:accelerated",
        kill=8,
        kills=(9,),
        saved=ends_of_epochs,
        other=DROPOUT,
    ),
    framework("frameworks:accelerated_by_batch", sibling="frameworks:accelerated"),
]


PLACES = [*os.environ.get("CONCERTINA_FRAMEWORKS", "").split(os.pathsep), *sys.path]
"""Folders with packages, some of which are too large to be in the lock: notebook/scripts.md says with which."""


def with_package(case: Case) -> Case:
    """Find the package that a script imports, or skip the test."""
    if not case.package:
        return case
    place = next((each for each in PLACES if PathFinder.find_spec(case.package, [each])), None)
    if place is None:
        pytest.skip(f"{case.package} is not installed, nor in a folder of CONCERTINA_FRAMEWORKS")
    return dataclasses.replace(case, path=place)


def law(script: str) -> pytest.MarkDecorator:
    """Return a mark that names the test of the gate which shows the same for this script."""
    case = next(case for case in CASES if case.script == script)
    if case.sibling:
        return law(case.sibling)
    return pytest.mark.long(law=f"tests/train/scripts/test_loops.py::test_killed_and_started_again[{case.id}]")


@pytest.mark.parametrize(
    "case", [pytest.param(case, id=case.id, marks=[law(case.sibling)] if case.sibling else []) for case in CASES]
)
def test_killed_and_started_again(folder, parents, case):
    killed_and_started_again(
        folder, parents[case.parent], with_package(case), case.kill, (case.first, *case.others[:1])
    )


MATRIX = [
    pytest.param(case, kill, marks=law(case.sibling or case.script), id=f"{case.id}-{kill}")
    for case in CASES
    if not isinstance(case.same, Refused)
    for kill in sorted({case.kill, *case.kills})
]


@pytest.mark.parametrize(("case", "kill"), MATRIX)
def test_killed_at_other_places_and_started_in_all_worlds(folder, parents, case, kill):
    killed_and_started_again(folder, parents[case.parent], with_package(case), kill, (case.first, *case.others))


@dataclasses.dataclass(frozen=True)
class Drain:
    """A planned end of a world, which a stand-in for the agents announces."""

    script: str
    before: int
    """The commit before which ranks hear of it."""
    ends: int
    """The commit that ends the round, and what is restored."""

    @property
    def id(self) -> str:
        return f"{self.script.replace('_', '-')}-{self.before}"


DRAINS = [
    Drain("models:gan", before=5, ends=5),
    Drain("accumulation:by_micro_batch", before=5, ends=8),
    Drain("accumulation:by_micro_batch", before=8, ends=8),
    Drain("accumulation:overflowing", before=5, ends=7),
    Drain("buffers:queue", before=5, ends=5),
    Drain("data:distributed", before=6, ends=6),
    Drain("frameworks:accelerated", before=7, ends=9),
]


GATE_DRAINS = ("models:gan", "frameworks:accelerated")
"""Scripts whose planned end is of the gate: one whose steps are all the same, and one that steps every four batches."""
DRAIN_LAW = "tests/train/scripts/test_loops.py::test_a_planned_end_waits_for_the_next_optimizer_step"


@pytest.mark.parametrize(
    "drain",
    [
        pytest.param(drain, id=drain.id, marks=[] if drain.script in GATE_DRAINS else [pytest.mark.long(law=DRAIN_LAW)])
        for drain in DRAINS
    ],
)
def test_a_planned_end_waits_for_the_next_optimizer_step(folder, parents, drain):
    case = next(case for case in CASES if case.script == drain.script)
    whole = Start(case.script, folder / "whole", case.first, case.steps)
    (uninterrupted,) = killed.run(parents[case.parent], whole)
    job = Agents(folder / "job", parents[case.parent])
    before, outcome = job.run(dataclasses.replace(whole, folder=folder / "before", asks_before=drain.before))
    assert set(before.codes) == {0}, before.output
    assert {(done.outcome, done.step) for done in outcome.done.values()} == {("drained", drain.ends)}
    after, _ = job.run(dataclasses.replace(whole, folder=folder / "after"))
    assert set(after.codes) == {0}, after.output
    assert isinstance(case.same, Equal)
    check(case, case.same, uninterrupted, before, after, drain.ends)


def test_a_kill_within_the_grace_goes_back_to_the_last_optimizer_step(folder, parents):
    case = next(case for case in CASES if case.script == "accumulation:by_micro_batch")
    whole = Start(case.script, folder / "whole", case.first, case.steps)
    (uninterrupted,) = killed.run(parents[case.parent], whole)
    job = Agents(folder / "job", parents[case.parent])
    before, outcome = job.run(dataclasses.replace(whole, folder=folder / "before", asks_before=6, stops_after=7))
    assert not outcome.done
    after, _ = job.run(dataclasses.replace(whole, folder=folder / "after"))
    check(case, Equal(), uninterrupted, before, after, 4)


@pytest.mark.parametrize(
    ("script", "match"),
    [
        ("subclasses:opaque_moments", r"optimizer.*Opaque"),
        ("refused:two_states", "already has a State"),
        ("refused:unsaveable_value", r"kept\.function"),
    ],
)
def test_what_cant_be_saved_is_a_failure_for_good(folder, parents, script, match):
    job = Agents(folder / "job", parents["loops.preload"])
    _, outcome = job.run(Start(script, folder / "run", 1, 4))
    (fault,) = outcome.faults.values()
    assert fault.reason in BAD_INPUTS
    assert re.search(match, fault.message)


def test_a_second_writer_of_a_folder_is_refused(folder, parents):
    case = Case("refused:plain", first=1)
    first = Start(case.script, folder / "first", 1, 12, stops_after=3)
    second = dataclasses.replace(first, folder=folder / "second", stops_after=0)
    parent = parents[case.parent]
    with killed.running(parent, first):
        second.folder.mkdir()
        (second.folder / "checkpoints").symlink_to(first.folder / "checkpoints")
        (refused,) = killed.run(parent, second)
        check_refused(Refused("checkpoints"), refused)
    (after,) = killed.run(parent, dataclasses.replace(second, folder=second.folder))
    assert after.restored_step == 3
    assert after.codes == [0]
