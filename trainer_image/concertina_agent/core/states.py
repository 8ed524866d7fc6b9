"""States of an agent, and the transitions between them that are allowed.

A state is not stored but derived from facts (`AgentState.state`), so it cannot be outdated. The table TRANSITIONS lists
the allowed changes of the state. After each event, `machine.step` compares the state with the state before the event. A
change that no row of the table allows yields the effect IllegalTransition. The table follows from two rules:

1. Only a Prepare ends the membership in a round, whatever the outcome of the round. Every state can therefore change to
   `preparing`, but only by a Prepare. An agent whose round has failed, drained or succeeded reports that state until
   the operator begins another round.
2. The end of a round is final: only a Prepare leaves `succeeded`, `failed` and `drained`. There is one exception. A
   worker's last message about a saved snapshot may be read after the worker's exit. No other replica has a copy of this
   snapshot yet, so the agent's state changes from `drained` back to `draining`.

A state that does not change needs no row. Events without a row (StorageSeen, PartShipped and others) change facts, but
never the state. If an agent gets a termination notice before its Assign (the message that begins the round), its state
changes from `starting` to `draining` at once. The state that a coordinator reports for its whole round is not part of
the table (see `AgentState.reported`).

The coordinator is the agent of rank 0. In a drain, all ranks stop after the same step. The message Prepare asks a
replica to join the next round. A round is a period in which a fixed set of replicas trains. A snapshot is a copy of the
training state in node memory.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping

import concertina_protocol as p
from concertina_agent.core import events as e


class OwnState(str, enum.Enum):
    """States of an agent's own part in a round: `preparing`, and the states that messages can contain.

    A round is a period in which a fixed set of replicas trains.
    """

    IDLE = p.State.IDLE.value
    """No Prepare has arrived since this agent started."""
    PREPARING = "preparing"
    """Workers of older rounds may still run, or the store's port is not bound.

    The agent does not accept an Assign yet.
    """
    PREPARED = p.State.PREPARED.value
    STARTING = p.State.STARTING.value
    """The agent has received Assign, but not all of its workers have sent a message yet."""
    RUNNING = p.State.RUNNING.value
    DRAINING = p.State.DRAINING.value
    """Workers are about to stop after the same step. Or they have stopped, and their last snapshots are not copied yet.

    Each replica keeps copies of another replica's snapshots.
    """
    DRAINED = p.State.DRAINED.value
    SUCCEEDED = p.State.SUCCEEDED.value
    FAILED = p.State.FAILED.value

    @property
    def on_wire(self) -> p.State:
        """State of a message that corresponds to this state. Messages contain `prepared` instead of `preparing`."""
        return p.State.PREPARED if self is OwnState.PREPARING else p.State(self.value)


OVER = (OwnState.SUCCEEDED, OwnState.DRAINED, OwnState.FAILED)
"""States of an agent whose part in the round has ended."""


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
"""Events that may lead from a state (first key) to another state (second key).

For a request, the table contains the class of the request's message.
"""


def trigger(event: e.Event) -> type:
    """Return the class by which the table TRANSITIONS refers to an event.

    For a request, it is the class of the request's message.
    """
    return type(event.message) if isinstance(event, e.RequestReceived) else type(event)


def illegal(before: OwnState, event: e.Event, after: OwnState) -> list[e.Effect]:
    """Return an IllegalTransition if the table TRANSITIONS does not allow this change of state; empty otherwise."""
    if after is before or trigger(event) in TRANSITIONS[before].get(after, ()):
        return []
    return [e.IllegalTransition(f"{trigger(event).__name__} has led from {before.value} to {after.value}")]
