"""Names of the problems of training runs, and the thresholds at which the problems are reported.

`concertina diagnose`, the alerts and the runbooks use the same names. All thresholds are defined only here.
"""

from __future__ import annotations

import enum

RUNBOOKS = "docs/runbooks"


class Problem(enum.StrEnum):
    """Names of the problems that a training run can have.

    Each problem has an alert `ConcertinaNAME` and a runbook `docs/runbooks/NAME.md`.
    """

    LOW_MFU = "LowMfu"
    LOW_GPU_UTILIZATION = "LowGpuUtilization"
    """The GPUs run no kernel for much of the time, in a job with a script, whose MFU is not known."""
    EXPOSED_COMMUNICATION = "ExposedCommunication"
    INPUT_BOTTLENECK = "InputBottleneck"
    STRAGGLER = "Straggler"
    SLOW_CHECKPOINT = "SlowCheckpoint"
    """Training waits for snapshots or checkpoints."""
    CHECKPOINT_OLD = "CheckpointOld"
    STORAGE_REFUSES = "StorageRefuses"
    """Durable storage does not accept checkpoints: it is full, denies access or does not exist."""
    FREQUENT_FAILURES = "FrequentFailures"
    """Recovery and repeated steps take a significant share of the job's time."""
    HANG = "Hang"
    """Ranks wait for another rank, or in a collective that does not complete."""
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
    """The operator is connected to so few agents that it assumes a fault of its own network connection."""
    OPERATOR_DOWN = "OperatorDown"
    JOB_FAILED = "JobFailed"
    """The job has failed for a reason that no other problem describes."""
    JOB_STALLED = "JobStalled"
    """The job waits for action by a person, for a reason that no other problem describes."""

    @property
    def runbook(self) -> str:
        """Path, in the repository, of the runbook for this problem."""
        return f"{RUNBOOKS}/{self}.md"


TRAINING = ("productive", "communication", "straggler", "input", "checkpoint", "evaluation", "compile")
"""Goodput classes that count as training time."""
LEAST_TRAINING = 0.5
"""Minimum share of training time for alerts about the parts of training time.

If less of the time is training time, other alerts report what prevents training.
"""
LOW_MFU = 0.2
"""MFU (share of the devices' peak floating-point rate) below which the problem LowMfu is reported.

Dense transformers on recent GPUs reach 0.35 to 0.5.
"""
LOW_GPU_UTILIZATION = 0.5
"""Share of the time in which a job's median GPU runs a kernel, below which LowGpuUtilization is reported.

A GPU that waits for nothing is above 0.9, however slow its kernels are.
"""
EXPOSED_COMMUNICATION = 0.25
"""Share of the training time from which exposed communication is reported. The next four thresholds are shares too."""
INPUT_BOTTLENECK = 0.1
STRAGGLER = 0.1
SLOW_CHECKPOINT = 0.05
FREQUENT_FAILURES = 0.1
CHECKPOINT_INTERVALS = 3
"""Age of the newest checkpoint from which the age is reported, as a multiple of the checkpoint interval.

The interval is `checkpoint.everySeconds`. If that field is Auto, it is the interval that was computed.
"""
RESTARTS_REMAINING = 1
"""Number of remaining restarts at or below which the number is reported."""
LOSS_SPIKE = 2.0
"""Ratio of the current loss to the usual loss above which a loss spike is reported."""
MEMORY_HOURS = 6.0
"""Hours until the workers' memory reaches the container's limit, below which growing memory is reported.

For a container without a limit, these are the hours until the memory doubles.
"""
MEMORY_GREW = 0.02
"""Minimum relative growth of the memory between the first and the last reading. Less growth is noise."""
OPERATOR_SILENT_SECONDS = 300.0
"""Age in seconds of the goodput in the status of a training job, above which the operator is reported as silent.

With a thousand jobs, the operator updates the goodput of each job every 50 s.
"""
