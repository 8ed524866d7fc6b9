"""Table of an agent's states: each of its transitions occurs, no other one does, and the docs show the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import concertina_protocol as p
from builders.agent import UID, Driver, assignment, prepare, snapshot
from concertina_agent.core import events as e
from concertina_agent.core import machine, states
from concertina_agent.core.states import TRANSITIONS, OwnState
from concertina_protocol import worker_channel as w

DOCS = Path(__file__).parents[4] / "docs" / "architecture.md"
COORDINATOR, MEMBER = "a", "b"


def running(driver: Driver, rank: int) -> None:
    driver.begun("a", "b")
    driver.say(w.Hello(rank, 1), rank=rank)


def ended(driver: Driver, rank: int, outcome: str) -> None:
    running(driver, rank)
    driver.say(w.Done(outcome, 6), rank=rank)
    driver.ended(0, rank=rank)


def uncopied(driver: Driver, rank: int) -> None:
    """Bring an agent into the state in which its worker has stopped and its peer lacks the last snapshot."""
    running(driver, rank)
    driver.say(w.Committed(snapshot(1, 6, 2), rank, "slot-0"), rank=rank)
    driver.say(w.Done("drained", 6), rank=rank)
    driver.ended(0, rank=rank)


def draining(driver: Driver, rank: int) -> None:
    running(driver, rank)
    driver.tell(e.TerminationNotice(1000))


def drained(driver: Driver, rank: int) -> None:
    draining(driver, rank)
    driver.say(w.Done("drained", 6), rank=rank)
    driver.ended(0, rank=rank)


def drain_ordered(driver: Driver, rank: int) -> None:
    uncopied(driver, rank)
    order = p.Drain(UID, 1, "claim-1", "scale", False, 1.0)
    if rank == 0:
        driver.ask(order)
    else:
        driver.tell(e.CoordinatorMessage(1, "claim-1", order))
    driver.now += 1.0


def prepared(*, store: bool = True, gone: bool = True, noticed: bool = False) -> Callable[[Driver, int], None]:
    def bring(driver: Driver, rank: int) -> None:
        driver.ask(prepare())
        if store:
            driver.tell(e.StoreBound(1, "claim-1", "here:9"))
        if gone:
            driver.tell(e.WorkersGone(1))
        if noticed:
            driver.tell(e.TerminationNotice(1000))

    return bring


SITUATIONS: dict[str, Callable[[Driver, int], object]] = {
    "idle": lambda driver, rank: None,
    "no worker gone": prepared(gone=False),
    "no store": prepared(store=False),
    "prepared": prepared(),
    "prepared, with a notice": prepared(noticed=True),
    "starting": lambda driver, rank: driver.begun("a", "b"),
    "running": running,
    "stopped, not copied": uncopied,
    "noticed": draining,
    "at the end of a drain's grace": drain_ordered,
    "drained": drained,
    "drained unasked": lambda driver, rank: ended(driver, rank, "drained"),
    "succeeded": lambda driver, rank: ended(driver, rank, "complete"),
    "failed": lambda driver, rank: (running(driver, rank), driver.ended(1, rank=rank)),
}
"""Events by which an agent of rank 0 (coordinator) or 1 gets into a situation."""


def happenings(rank: int) -> Iterator[tuple[float, list[e.Event]]]:
    """Yield pairs of seconds and the events that follow; the transition of the last event is checked."""
    id, failure = snapshot(1, 7, 2), p.Failure("b", "WorkerFailed", "")
    other = "b" if rank == 0 else "a"
    drain = p.Drain(UID, 1, "claim-1", "scale", True, 5.0)
    for request in (prepare(2), prepare(), assignment("a", "b"), drain, p.Save(UID, 1, "claim-1", "r"), p.Ping(UID)):
        yield 0.0, [e.RequestReceived(99, request)]
    said = (w.Hello(rank, 1), w.Committed(id, rank, "slot-0"), w.Done("complete", 6), w.Fault("InvalidInput", ""))
    for message in (*said, w.Register(rank), w.CallCount(rank, 1), w.Beat(rank, 6, "computing")):
        yield 0.0, [e.WorkerMessage(1, rank, message)]
    for code, done in ((0, "complete"), (0, "drained"), (1, "drained"), (-9, "complete")):
        yield 0.0, [e.WorkerMessage(1, rank, w.Done(done, 6)), e.WorkerExited(1, rank, code)]
    yield 0.0, [e.WorkerExited(1, rank, 1)]
    for state in ("running", "drained", "succeeded", "failed"):
        cause = failure if state == "failed" else None
        member = p.MemberState(other, f"{other}-1", 1, "claim-1", state, failure=cause, notice=5.0)
        yield 0.0, [e.MemberMessage(member)]
        yield 0.0, [e.CoordinatorMessage(1, "claim-1", member)]
    for message in (drain, p.StopAt(0), p.DurableMoved(p.Durable(UID, 1, 6, "uri"))):
        yield 0.0, [e.CoordinatorMessage(1, "claim-1", message)]
    for event in (
        e.CoordinatorJoined(1, "claim-1"),
        e.CoordinatorGone(1, "claim-1"),
        e.MemberGone(1, "claim-1", other),
    ):
        yield 0.0, [event]
    reached = e.Reached(prepare(), ("a", "b"))
    for event in (e.WorkersGone(1), e.StoreBound(1, "claim-1", "here:9"), reached, e.StartFailed(1, "no")):
        yield 0.0, [event]
    shipped, published = e.PartShipped(p.Part(id, rank)), e.PublishDone(id, p.Durable(UID, 1, 6, "uri"))
    copied = (e.PeerCopied(id, rank), e.PeerCopied(snapshot(1, 6, 2), rank), e.CopyHeld(id, 1 - rank))
    for event in (*copied, shipped, published, e.StorageSeen(p.Storage("Ready")), e.Warm(), e.StacksCollected(1, {})):
        yield 0.0, [event]
    for seconds in (0.0, 0.3, 60.0):  # Nothing has arrived, but the agent was running: only the last tick comes late.
        yield seconds, [e.Tick()]
    yield 0.0, [e.Tick(stopped=((rank, 5),)), e.Tick(stopped=((rank, 5),))]
    yield 0.0, [e.TerminationNotice(30)]


def arrows(bundled: bool, storage: p.Storage | None) -> Iterator[tuple[OwnState, OwnState, type]]:
    """Yield all transitions that the machine makes."""
    for rank, name in enumerate((COORDINATOR, MEMBER)):
        for bring in SITUATIONS.values():
            for seconds, events in happenings(rank):
                driver = Driver(name, bundled=bundled, storage=storage)
                bring(driver, rank)
                if seconds:
                    driver.wait(seconds)
                for event in events[:-1]:
                    driver.tell(event)
                before = driver.core.state
                driver.tell(events[-1])
                if driver.core.state is not before:
                    yield before, driver.core.state, states.trigger(events[-1])


def late_coordinator(name: str, bring: Callable[[Driver, int], object]) -> tuple[OwnState, OwnState, type]:
    """Return the transition of the first tick at which a member finds its coordinator silent."""
    driver = Driver(name)
    bring(driver, 1)
    while True:
        before = driver.core.state
        driver.now += 0.25
        driver.tell(e.Tick())
        if driver.core.state is not before:
            return before, driver.core.state, e.Tick


def test_every_arrow_of_the_table_is_taken_and_no_other():
    taken = {*arrows(True, None), *arrows(True, p.Storage("Ready")), *arrows(False, None)}
    taken |= {late_coordinator(MEMBER, SITUATIONS[where]) for where in ("starting", "running", "noticed")}
    known = {(a, b, trigger) for a, row in TRANSITIONS.items() for b, triggers in row.items() for trigger in triggers}
    assert taken - known == set()
    assert known - taken == set()


def test_a_step_says_what_the_table_lacks(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(states, "TRANSITIONS", {**TRANSITIONS, OwnState.IDLE: {}})
    with pytest.raises(AssertionError, match="Prepare has led from idle to preparing"):
        Driver().ask(prepare())


def test_every_event_and_request_has_a_handler_of_its_name():
    for events, handlers in ((e.Event, machine.HANDLERS), (e.Request, machine.REQUESTS)):
        assert set(events.__args__) == set(handlers)
        for event, handler in handlers.items():
            words = "".join(f"_{c.lower()}" if c.isupper() else c for c in event.__name__)
            assert handler.__name__ == f"on{words}"


def drawn() -> str:
    lines = ["| State | becomes | by |", "|---|---|---|"]
    for state, row in TRANSITIONS.items():
        for after, triggers in row.items():
            lines.append(f"| {state.value} | {after.value} | {', '.join(trigger.__name__ for trigger in triggers)} |")
    return "\n".join(lines)


def test_the_documentation_shows_the_table():
    assert drawn() in DOCS.read_text(), f"docs/architecture.md lacks:\n\n{drawn()}"


def test_states_are_the_words_of_the_wire():
    """The only exception is `preparing`, which is reported as `prepared`."""
    driver = Driver()
    driver.ask(prepare())
    assert (driver.core.state, driver.report.state, driver.core.member_state().state) == (
        OwnState.PREPARING,
        "prepared",
        "starting",
    )
