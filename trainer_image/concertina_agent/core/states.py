"""The states of one agent, and which may follow from which: the theory of `machine`.

A state is what the facts say (`AgentState.state`): nothing stores it a second time, so it can't be out of date. What
keeps the facts honest is TRANSITIONS: after each event `machine.step` compares the state before and after, and a change
that stands in no row is the effect IllegalTransition. Two rules make the table what it is:

1. A round is left by a Prepare alone, whatever its end: `preparing` follows from every state, and from no other event.
   So a round that has failed, drained or succeeded says so until the operator has heard of it.
2. An end is said once. `succeeded` and `failed` are left by a Prepare alone; `drained` as well, but for a commit that
   was made before the worker's exit and is told after it, when its socket was slow to close: the peer lacks that copy.

Staying where one is needs no row. Events that no row names (StorageSeen, PartShipped, ...) change facts, never a state.
A `starting` agent whose notice came before its Assign drains at once. What a coordinator reports of its whole round is
no state of its own: see `AgentState.reported`.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping

import concertina_protocol as p
from concertina_agent.core import events as e


class OwnState(str, enum.Enum):
    """The wire's State, and `preparing`."""

    IDLE = p.State.IDLE.value
    """No Prepare since this agent has started."""
    PREPARING = "preparing"
    """Workers of older rounds may live, or the store is not bound: no Assign is accepted yet."""
    PREPARED = p.State.PREPARED.value
    STARTING = p.State.STARTING.value
    """Assigned; not all own workers have said something."""
    RUNNING = p.State.RUNNING.value
    DRAINING = p.State.DRAINING.value
    """Workers stop after the same step, or have stopped, and the peer lacks a copy of their last snapshots."""
    DRAINED = p.State.DRAINED.value
    SUCCEEDED = p.State.SUCCEEDED.value
    FAILED = p.State.FAILED.value

    @property
    def on_wire(self) -> p.State:
        """As Report and MemberState say it; what is being prepared is not told apart there."""
        return p.State.PREPARED if self is OwnState.PREPARING else p.State(self.value)


OVER = (OwnState.SUCCEEDED, OwnState.DRAINED, OwnState.FAILED)
"""The ends of a round for one agent."""


DRAIN_BEGINS = (p.Drain, e.CoordinatorMessage, e.MemberMessage, e.TerminationNotice)
ROUND_FAILS = (e.WorkerExited, e.StartFailed, e.CoordinatorGone, e.Tick)
TRANSITIONS: Mapping[OwnState, Mapping[OwnState, tuple[type, ...]]] = {
    OwnState.IDLE: {
        OwnState.PREPARING: (p.Prepare,),
    },
    OwnState.PREPARING: {
        OwnState.PREPARED: (e.WorkersGone, e.StoreBound),
    },
    OwnState.PREPARED: {
        OwnState.PREPARING: (p.Prepare,),
        OwnState.STARTING: (p.Assign,),
        OwnState.DRAINING: (p.Assign,),
    },
    OwnState.STARTING: {
        OwnState.PREPARING: (p.Prepare,),
        OwnState.RUNNING: (e.WorkerMessage,),
        OwnState.DRAINING: DRAIN_BEGINS,
        OwnState.FAILED: ROUND_FAILS,
    },
    OwnState.RUNNING: {
        OwnState.PREPARING: (p.Prepare,),
        OwnState.DRAINING: DRAIN_BEGINS,
        OwnState.DRAINED: (e.WorkerExited, e.PeerCopied),
        OwnState.SUCCEEDED: (e.WorkerExited,),
        OwnState.FAILED: ROUND_FAILS,
    },
    OwnState.DRAINING: {
        OwnState.PREPARING: (p.Prepare,),
        OwnState.DRAINED: (e.WorkerExited, e.PeerCopied, e.Tick),
        OwnState.SUCCEEDED: (e.WorkerExited,),
        OwnState.FAILED: ROUND_FAILS,
    },
    OwnState.DRAINED: {
        OwnState.PREPARING: (p.Prepare,),
        OwnState.DRAINING: (e.WorkerMessage,),
        OwnState.RUNNING: (e.WorkerMessage,),
    },
    OwnState.SUCCEEDED: {
        OwnState.PREPARING: (p.Prepare,),
    },
    OwnState.FAILED: {
        OwnState.PREPARING: (p.Prepare,),
    },
}
"""State -> what it may become -> by which event (of a request: its message)."""


def trigger(event: e.Event) -> type:
    """What stands for this event in TRANSITIONS."""
    return type(event.message) if isinstance(event, e.RequestReceived) else type(event)


def illegal(before: OwnState, event: e.Event, after: OwnState) -> list[e.Effect]:
    """Empty where TRANSITIONS has this arrow."""
    if after is before or trigger(event) in TRANSITIONS[before].get(after, ()):
        return []
    return [e.IllegalTransition(f"{trigger(event).__name__} has led from {before.value} to {after.value}")]
