"""Lines with the changes of a report: they lead to the same reports as whole ones."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

import concertina_protocol as protocol
from concertina_protocol import FailureReason, MemberState, Progress, ProtocolError, Report, ReportChange, State

NAMES = ("job-0-0", "job-1-0", "job-2-0")
members = st.fixed_dictionaries(
    {},
    optional={
        name: st.builds(
            MemberState,
            st.just(name),
            st.just("i"),
            st.just(1),
            st.just("c"),
            st.sampled_from([State.STARTING, State.RUNNING, State.FAILED]),
            step=st.none() | st.integers(0, 3),
            notice=st.none() | st.just(5.0),
        )
        for name in NAMES
    },
)
progress = st.none() | st.builds(
    Progress,
    st.integers(0, 3),
    st.sampled_from([None, 3]),
    *(st.just(0.5),) * 3,
    st.just(0),
    st.sampled_from(["training", "restoring"]),
    st.just(1.0),
    first_step_at=st.sampled_from([None, 1.0]),
)
failures = st.lists(
    st.builds(protocol.Failure, st.sampled_from(NAMES), st.just(FailureReason.MEMBER_LOST), st.just("gone")), max_size=2
).map(tuple)
reports = st.builds(
    Report,
    st.just("job-0-0"),
    st.sampled_from(["i", "j"]),
    st.booleans(),
    st.integers(1, 2),
    st.just("c"),
    st.sampled_from([State.RUNNING, State.PREPARED]),
    coordinator=st.booleans(),
    members=members,
    failures=failures,
    progress=progress,
)


@given(st.lists(reports, min_size=1, max_size=8))
def test_whoever_hears_all_lines_knows_each_report(told: list[Report]) -> None:
    known = told[0]
    for before, after in itertools.pairwise(told):
        line = protocol.decode(protocol.encode(protocol.change(before, after)))
        known = protocol.changed(known, line) if isinstance(line, ReportChange) else line
        assert known == after


@given(reports, st.integers(0, 2))
def test_a_line_names_only_members_that_have_changed(before: Report, last: int) -> None:
    some = [name for name in NAMES[: last + 1] if name in before.members]
    other = {name: dataclasses.replace(before.members[name], step=9) for name in some}
    line = protocol.change(before, dataclasses.replace(before, members={**before.members, **other}))
    assert isinstance(line, ReportChange)
    assert line.report.members == other


def report(**fields: object) -> Report:
    made_report = Report("job-0-0", "i", True, 1, "c", State.RUNNING, coordinator=True)
    return dataclasses.replace(made_report, **fields)  # type: ignore[arg-type]


def test_a_change_of_another_report_is_refused() -> None:
    stranger = {"x": MemberState("x", "i", 1, "c", State.RUNNING)}
    for other in (report(round=2), report(instance="j"), report(members=stranger)):
        with pytest.raises(ProtocolError, match="a change that does not follow the previous report"):
            protocol.changed(report(), ReportChange(other))


def test_numbers_of_progress_can_wait_and_all_else_cannot() -> None:
    at_work = Progress(1, 10, 0.5, 1.0, 1.0, 8, "training", 1.0, first_step_at=1.0)
    members = {"job-1-0": MemberState("job-1-0", "i", 1, "c", State.RUNNING, step=1)}
    before = report(progress=at_work, members=members)

    def told(**fields: object) -> Report:
        return report(progress=dataclasses.replace(at_work, **fields), members=members)  # type: ignore[arg-type]

    later = {"job-1-0": dataclasses.replace(members["job-1-0"], step=2)}
    gone = {"job-1-0": dataclasses.replace(members["job-1-0"], state=State.FAILED)}
    for after in (before, told(step=2, loss=0.4, at=2.0), dataclasses.replace(before, members=later)):
        assert protocol.only_numbers(before, after)
    for after in (
        told(step=10),
        told(phase="checkpointing"),
        told(first_step_at=None),
        dataclasses.replace(before, members=gone),
        dataclasses.replace(before, ready=False),
        dataclasses.replace(before, progress=None),
    ):
        assert not protocol.only_numbers(before, after)
