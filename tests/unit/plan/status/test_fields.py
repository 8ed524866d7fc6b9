"""Tables that a pass uses."""

from __future__ import annotations

from dataclasses import replace

from builders import jobs
from builders.jobs import T0
from concertina.api.internal import PACKED, Internal
from concertina.api.status import JobStatus
from concertina.plan.plan import plan
from concertina.plan.status.fields import FIELDS, INTERNAL, INTERNAL_CLOCK


def test_each_field_of_the_status_has_a_row() -> None:
    assert {*FIELDS, "internal"} == set(JobStatus.model_fields)
    assert {*INTERNAL, *INTERNAL_CLOCK, *PACKED} == set(Internal.model_fields)


def test_rows_give_what_the_fields_hold() -> None:
    made = plan(jobs.running(jobs.spec()), T0 + 20).status
    assert JobStatus.model_validate(made.manifest()) == made


def test_a_status_in_which_nothing_has_changed_is_the_same_object() -> None:
    seen = jobs.running(jobs.spec())
    assert plan(seen, T0 + 10).status is seen.job.status
    hurried = replace(seen, progress_every=0.0)
    assert plan(hurried, T0 + 10).status is seen.job.status, "neither where the numbers may be written but are the same"


def test_a_status_says_what_is_lost_where_nodes_are_not_watched() -> None:
    seen = jobs.running(jobs.spec())
    assert plan(seen, T0 + 20).status.nodes_not_watched is None
    without = replace(seen, nodes={}, nodes_watched=False)
    sentence = plan(without, T0 + 20).status.nodes_not_watched or ""
    assert [
        word for word in ("taints", "cordon", "not ready", "fits", "preference", "Zones") if word not in sentence
    ] == []
    made = plan(jobs.then(without, plan(without, T0 + 20), nodes_watched=True), T0 + 30)
    assert made.status.nodes_not_watched is None
