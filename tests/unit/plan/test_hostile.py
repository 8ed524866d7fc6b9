"""Arbitrary reports of agents: once they are within bounds, plan() decides, and the API server accepts the status."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import random
import typing
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import concertina_protocol as protocol
from builders import jobs
from concertina.agents.bounds import bounded
from concertina.api.status import JobStatus
from concertina.plan.observed import JobObservation
from concertina.plan.plan import plan
from concertina_protocol.codec.typed_json import OpenEnum

NUMBERS = (-(2**63), -1, 0, 1, 2, 39, 41, 100, 101, 2**63, 2**80)
FLOATS = (-1e300, -1.0, 0.0, 0.5, 2.0, jobs.T0 + 9, jobs.T0 + 15, 1e12, 1e300, math.nan, math.inf, -math.inf)
WORDS = (
    "", "running", "failed", "drained", "succeeded", "training", "demo-0-0", "demo-1-0", "i-demo-1-0", "claim-a",
    "Ready", "Error", "WorkerFailed", "LossSpike", "InvalidInput", "x" * 5000, "\ud800\x00\n", "Memory", "Fresh", "0",
)  # fmt: skip


def anything(kind: Any, draw: random.Random) -> Any:
    """Return a value of a protocol's type, including unusual ones."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Union:
        return draw.choice((None, anything(next(arg for arg in args if arg is not type(None)), draw)))
    if origin is tuple:
        kinds = [args[0]] * draw.randrange(3) if args[-1] is Ellipsis else args
        return tuple(anything(each, draw) for each in kinds)
    if origin is not None:
        return {draw.choice(WORDS): anything(args[1], draw) for _ in range(draw.randrange(3))}
    if dataclasses.is_dataclass(kind):
        hints = HINTS(kind)
        return kind(**{each.name: anything(hints[each.name], draw) for each in dataclasses.fields(kind)})
    if issubclass(kind, OpenEnum):
        return kind(draw.choice(WORDS))
    return draw.choice({bool: (False, True), int: NUMBERS, float: FLOATS, str: WORDS}[kind])


HINTS = functools.cache(typing.get_type_hints)
SEEDS = st.integers(0, 2**32)
STORED = {"uri": "s3://bucket/x", "everySeconds": "Auto"}
SPECS = {
    "bundled": jobs.spec(),
    "stored": jobs.spec(checkpoint=STORED, failurePolicy={"onStraggler": "Replace"}),
    "command": jobs.command_spec(),
}
BUNDLED, COMMAND = jobs.running(SPECS["bundled"]), jobs.running(SPECS["command"])
STORES = replace(BUNDLED, job=replace(BUNDLED.job, spec=SPECS["stored"]))
TRAINS = {"bundled": BUNDLED, "stored": STORES, "command": COMMAND}


def wire(message: Any) -> Any:
    """Return the message as it comes from an agent."""
    return bounded(protocol.decode(protocol.encode(message)))


def planned(seen: JobObservation, now: float) -> JobStatus:
    """Return the status of a pass, as the API server accepts it."""
    made = plan(seen, now)
    stored = json.dumps(made.status.manifest(), allow_nan=False)
    assert len(stored) < 1_000_000
    return JobStatus.model_validate_json(stored)


@pytest.mark.parametrize("kind", TRAINS)
@given(seed=SEEDS)
def test_any_report_of_a_coordinator_is_planned_on(kind: str, seed: int) -> None:
    draw, seen = random.Random(seed), TRAINS[kind]
    told, member = (anything(protocol.Report, draw) for _ in range(2))
    coordinator = replace(told, replica="demo-0-0", instance="i-demo-0-0", round=1, claim="claim-a")
    agents = dict(seen.agents)
    agents["demo-0-0"] = replace(agents["demo-0-0"], report=wire(coordinator))
    agents["demo-1-0"] = replace(agents["demo-1-0"], report=wire(replace(member, replica="demo-1-0")))
    seen = replace(seen, agents=agents)
    for wait in (0.0, 1.0, 100.0):
        status = planned(seen, jobs.T0 + 20 + wait)
        seen = replace(seen, job=replace(seen.job, status=status), fresh_claim=f"claim-{wait}")


@pytest.mark.parametrize("kind", TRAINS)
@given(seed=SEEDS)
def test_any_answer_to_a_prepare_is_planned_on(kind: str, seed: int) -> None:
    draw = random.Random(seed)
    seen = replace(
        TRAINS[kind], pods=TRAINS[kind].pods[1:], fresh_claim="claim-b"
    )  # The coordinator is gone, so a new round begins.
    now = jobs.T0 + 20
    made = plan(seen, now)
    prepares = jobs.sends(made, protocol.Prepare)
    assert prepares
    agents = dict(seen.agents)
    for name, message in prepares.items():
        reply = replace(anything(protocol.Prepared, draw), replica=name, round=message.round, claim=message.claim)
        agents[name] = jobs.called(agents[name], message, now, done_at=now, reply=wire(reply))
    planned(jobs.then(seen, made, agents=agents), now + 1)


def test_what_is_within_bounds_stays_as_it_is() -> None:
    failure = protocol.Failure("demo-0-0", "WorkerSignaled", "ended by SIGKILL", ("a", "b"), exit_code=-9, at=jobs.T0)
    progress = protocol.Progress(0, None, -2.5, 1.0, 0.1, 0, "training", jobs.T0, timeline={"start": 0.5})
    told = jobs.coordinator_report(failures=(failure,), progress=progress)
    assert bounded(told) == told


def test_what_is_below_the_number_for_none_is_none() -> None:
    progress = protocol.Progress(-5, -5, 0.0, 0.0, 0.0, 0, "training", jobs.T0, math.nan, -5, mfu=-1.0)
    received = wire(jobs.coordinator_report(progress=progress)).progress
    assert (received.steps, received.first_step_at, received.snapshot_step, received.mfu) == (None, None, None, None)
    assert received.step == 0, "a field that has no none"


def test_what_is_out_of_bounds_is_moved_to_the_nearest_bound() -> None:
    progress = protocol.Progress(2**70, -5, math.nan, math.inf, math.nan, 0, "x" * 9999, 1e300)
    received = wire(jobs.coordinator_report(progress=progress)).progress
    assert (received.step, received.steps, received.tokens_per_second, received.step_seconds) == (
        2**53,
        None,
        253_402_300_799.0,
        0.0,
    )
    assert (math.isnan(received.loss), received.at, len(received.phase)) == (True, 253_402_300_799.0, 63)


@pytest.mark.parametrize("claim", [None, {"round": 9}, {"round": -1}], ids=["none", "later", "earlier"])
def test_a_status_that_names_members_without_their_claim_is_gone_on_from(claim: dict[str, int] | None) -> None:
    """Another program wrote to the status, or a part of it is unreadable.

    A new round begins with all ready replicas.
    """
    seen = jobs.running(jobs.spec())
    world = seen.job.status.world
    assert world.claim is not None
    there = world.claim.model_copy(update={**claim, "committed": True}) if claim else None
    status = seen.job.status.model_copy(update={"world": world.model_copy(update={"claim": there})})
    made = plan(replace(seen, job=replace(seen.job, status=status)), jobs.T0 + 20)
    assert made.status.world.claim
    assert not made.status.world.claim.committed
    assert sorted(jobs.sends(made, protocol.Prepare)) == ["demo-0-0", "demo-1-0", "demo-2-0"]


def test_a_number_may_be_none_only_where_there_may_be_none() -> None:
    """-1 stands for an unknown round. As the step of a snapshot, it would be a base that no status accepts."""
    held = protocol.HeldSnapshot(protocol.SnapshotId(-1, -1, "layout", 1), (0,))
    prepared = protocol.Prepared("demo-0-0", "i", 1, "c", 1, "s", (), (held,), protocol.Storage("Ready", round=-5))
    within = bounded(prepared)
    assert (within.snapshots[0].id.round, within.snapshots[0].id.step) == (0, 0)
    assert within.storage is not None
    assert within.storage.round is None
