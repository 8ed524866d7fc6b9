"""Problems of runs, by names that `concertina diagnose`, alerts and runbooks share, and from where on a figure is one:
a threshold stands here and nowhere else."""

from __future__ import annotations

import enum

RUNBOOKS = "docs/runbooks"


class Problem(enum.StrEnum):
    """Each has an alert `ConcertinaNAME` and a page `docs/runbooks/NAME.md`."""

    LOW_MFU = "LowMfu"
    EXPOSED_COMMUNICATION = "ExposedCommunication"
    INPUT_BOTTLENECK = "InputBottleneck"
    STRAGGLER = "Straggler"
    SLOW_CHECKPOINT = "SlowCheckpoint"
    """Training waits for snapshots or checkpoints."""
    CHECKPOINT_OLD = "CheckpointOld"
    STORAGE_REFUSES = "StorageRefuses"
    """A disk or a bucket takes no checkpoint: full, forbidden, gone."""
    FREQUENT_FAILURES = "FrequentFailures"
    """Recovery and replayed steps take a noticeable part of the time."""
    RESTARTS_NEARLY_USED = "RestartsNearlyUsed"
    WORLD_BELOW_MINIMUM = "WorldBelowMinimum"
    LOSS_NAN = "LossNan"
    LOSS_SPIKE = "LossSpike"
    DATA_DIGEST_MISMATCH = "DataDigestMismatch"
    CORRUPT_STATE = "CorruptState"
    """Stored bytes are not those that were written."""
    MEMORY_GROWS = "MemoryGrows"
    TRACKER_UNREACHABLE = "TrackerUnreachable"
    OPERATOR_ISOLATED = "OperatorIsolated"
    """The operator takes the silence of many agents for its own fault."""
    OPERATOR_DOWN = "OperatorDown"
    JOB_FAILED = "JobFailed"
    """For a reason that none of the others says."""
    JOB_STALLED = "JobStalled"
    """It waits for a person, for a reason that none of the others says."""

    @property
    def runbook(self) -> str:
        """In the project."""
        return f"{RUNBOOKS}/{self}.md"


TRAINING = ("productive", "communication", "straggler", "input", "checkpoint", "evaluation", "compile")
"""Classes of the goodput that are parts of the time of training."""
LEAST_TRAINING = 0.5
"""Part of the time within which training must have been, for alerts of its parts; what kept it from that has others."""
LOW_MFU = 0.2
"""Of the devices' peak arithmetic; dense transformers on recent GPUs reach 0.35 to 0.5."""
EXPOSED_COMMUNICATION = 0.25
"""Part of the time of training, as those below."""
INPUT_BOTTLENECK = 0.1
STRAGGLER = 0.1
SLOW_CHECKPOINT = 0.05
FREQUENT_FAILURES = 0.1
CHECKPOINT_INTERVALS = 3
"""Of `checkpoint.everySeconds` or what the interval came to, since the newest checkpoint."""
RESTARTS_REMAINING = 1
"""Or fewer."""
LOSS_SPIKE = 2.0
"""Times the loss's usual value."""
MEMORY_HOURS = 6.0
"""Or fewer until the workers' memory reaches the container's limit, or is twice what it is where there is none."""
MEMORY_GREW = 0.02
"""Part of it by which it must have grown while it was looked at: less is noise."""
OPERATOR_SILENT_SECONDS = 300.0
"""Since the operator last counted the time of a job that trains: with a thousand jobs it does so every 50 s."""
