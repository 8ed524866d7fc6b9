"""States of one agent and the transitions between them, on which `machine` is based.

A state follows from the facts (`AgentState.state`). It is not stored separately, so it cannot be outdated. TRANSITIONS
keeps the facts consistent: after each event, `machine.step` compares the state before and after, and a change that is
in no row is the effect IllegalTransition. The table follows from two rules:

1. Only a Prepare ends the membership in a round, whatever its outcome: `preparing` follows from every state, and from
   no other event. So an agent whose round has failed, drained or succeeded reports that until the operator knows it.
2. An end is final. Only a Prepare leaves `succeeded` and `failed`. It also leaves `drained`, with one exception: a
   commit that was made before the worker's exit and is read after it, because its socket was slow to close. The peer
   lacks that copy.

A state that does not change needs no row. Events that no row names (StorageSeen, PartShipped, ...) change facts, but
never a state. A `starting` agent whose notice came before its Assign drains at once. The state that a coordinator
reports for its whole round is not a state of its own (see `AgentState.reported`).
"""

from __future__ import annotations

import enum
from collections.abc import Mapping

import concertina_protocol as p
from concertina_agent.core import events as e


class OwnState(str, enum.Enum):
    """State as on the wire, with `preparing` in addition."""

    IDLE = p.State.IDLE.value
    """No Prepare has arrived since this agent started."""
    PREPARING = "preparing"
    """Workers of older rounds may still run, or the store is not bound, so no Assign is accepted yet."""
    PREPARED = p.State.PREPARED.value
    STARTING = p.State.STARTING.value
    """The agent is assigned, but not all own workers have sent a message."""
    RUNNING = p.State.RUNNING.value
    DRAINING = p.State.DRAINING.value
    """Workers stop after the same step, or have stopped, and the peer lacks a copy of their last snapshots."""
    DRAINED = p.State.DRAINED.value
    SUCCEEDED = p.State.SUCCEEDED.value
    FAILED = p.State.FAILED.value

    @property
    def on_wire(self) -> p.State:
        """State as in Report and MemberState, which do not distinguish `preparing` from `prepared`."""
        return p.State.PREPARED if self is OwnState.PREPARING else p.State(self.value)


OVER = (OwnState.SUCCEEDED, OwnState.DRAINED, OwnState.FAILED)
"""Final states of a round for one agent."""


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
"""Events that lead from a state to another one; a request is represented by its message."""


def trigger(event: e.Event) -> type:
    """Return the type that represents this event in TRANSITIONS."""
    return type(event.message) if isinstance(event, e.RequestReceived) else type(event)


def illegal(before: OwnState, event: e.Event, after: OwnState) -> list[e.Effect]:
    """Return an IllegalTransition, or nothing if TRANSITIONS contains this transition."""
    if after is before or trigger(event) in TRANSITIONS[before].get(after, ()):
        return []
    return [e.IllegalTransition(f"{trigger(event).__name__} has led from {before.value} to {after.value}")]
