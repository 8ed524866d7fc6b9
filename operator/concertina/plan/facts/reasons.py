"""Why rounds begin and end, and replicas are given up, in the operator's words: those that several policies know. What
agents say of a failure is a `FailureReason`."""

from __future__ import annotations

import enum


class Reason(enum.StrEnum):
    FIRST_ROUND = "FirstRound"
    RESUMED = "Resumed"
    GROWING = "Growing"
    SHRINKING = "Shrinking"
    REPLICA_LEAVING = "ReplicaLeaving"
    REPLICA_MOVING = "ReplicaMoving"
    DRAINED = "Drained"
    TEMPLATE_CHANGED = "TemplateChanged"
    NODE_LOST = "NodeLost"
    REPLICA_DELETED = "ReplicaDeleted"
    REPLICA_ENDED = "ReplicaEnded"
    AGENT_RESTARTED = "AgentRestarted"
    ASSIGN_REFUSED = "AssignRefused"
    ASSIGN_FAILED = "AssignFailed"
    HANG = "Hang"
    """One worker is behind: its pod is replaced."""
    STANDSTILL = "Standstill"
    """All wait alike: only a new round can help."""
    STRAGGLER = "Straggler"
    IMAGE_UNAVAILABLE = "ImageUnavailable"
    AGENT_NEVER_STARTED = "AgentNeverStarted"
    AGENT_CANNOT_START = "AgentCannotStart"
    CUT_OFF = "CutOff"
    CONTAINER_RESTARTED = "ContainerRestarted"


PLANNED = frozenset(
    {
        Reason.FIRST_ROUND,
        Reason.GROWING,
        Reason.SHRINKING,
        Reason.REPLICA_LEAVING,
        Reason.REPLICA_MOVING,
        Reason.DRAINED,
        Reason.RESUMED,
    }
)
"""Reasons of claims before which nothing failed."""
