"""Problems of runs, and the thresholds at which a figure becomes a problem.

`concertina diagnose`, alerts and runbooks share these names. Every threshold is defined here and nowhere else.
"""

from __future__ import annotations

import enum

RUNBOOKS = "docs/runbooks"


class Problem(enum.StrEnum):
    """Problem of a run. Each has an alert `ConcertinaNAME` and a page `docs/runbooks/NAME.md`."""

    LOW_MFU = "LowMfu"
    EXPOSED_COMMUNICATION = "ExposedCommunication"
    INPUT_BOTTLENECK = "InputBottleneck"
    STRAGGLER = "Straggler"
    SLOW_CHECKPOINT = "SlowCheckpoint"
    """Training waits for snapshots or checkpoints."""
    CHECKPOINT_OLD = "CheckpointOld"
    STORAGE_REFUSES = "StorageRefuses"
    """Durable storage accepts no checkpoint: it is full, forbidden or gone."""
    FREQUENT_FAILURES = "FrequentFailures"
    """Recovery and replayed steps take a noticeable share of the time."""
    RESTARTS_NEARLY_USED = "RestartsNearlyUsed"
    WORLD_BELOW_MINIMUM = "WorldBelowMinimum"
    LOSS_NAN = "LossNan"
    LOSS_SPIKE = "LossSpike"
    DATA_DIGEST_MISMATCH = "DataDigestMismatch"
    CORRUPT_STATE = "CorruptState"
    """Stored bytes differ from the bytes that were written."""
    MEMORY_GROWS = "MemoryGrows"
    TRACKER_UNREACHABLE = "TrackerUnreachable"
    OPERATOR_ISOLATED = "OperatorIsolated"
    """The operator takes the silence of many agents for its own fault."""
    OPERATOR_DOWN = "OperatorDown"
    JOB_FAILED = "JobFailed"
    """The job has failed for a reason that no other problem covers."""
    JOB_STALLED = "JobStalled"
    """The job waits for a person, for a reason that no other problem covers."""

    @property
    def runbook(self) -> str:
        """Path of the runbook in the project."""
        return f"{RUNBOOKS}/{self}.md"


TRAINING = ("productive", "communication", "straggler", "input", "checkpoint", "evaluation", "compile")
"""Classes of the goodput that belong to the training time."""
LEAST_TRAINING = 0.5
"""Share of the time that must be training for alerts about its parts. Other alerts cover what prevents training."""
LOW_MFU = 0.2
"""Share of the devices' peak arithmetic. Dense transformers on recent GPUs reach 0.35 to 0.5."""
EXPOSED_COMMUNICATION = 0.25
"""Share of the training time, as are the thresholds below."""
INPUT_BOTTLENECK = 0.1
STRAGGLER = 0.1
SLOW_CHECKPOINT = 0.05
FREQUENT_FAILURES = 0.1
CHECKPOINT_INTERVALS = 3
"""Age of the newest checkpoint, in intervals (`checkpoint.everySeconds` or the interval that was computed)."""
RESTARTS_REMAINING = 1
"""Number of remaining restarts, or fewer."""
LOSS_SPIKE = 2.0
"""Multiple of the usual loss."""
MEMORY_HOURS = 6.0
"""Hours, or fewer, until the workers' memory reaches the container's limit, or has doubled if there is no limit."""
MEMORY_GREW = 0.02
"""Share by which the memory must have grown between the first reading and the last. Less is noise."""
OPERATOR_SILENT_SECONDS = 300.0
"""Seconds since the operator last counted the time of a training job. With a thousand jobs, it counts every 50 s."""
