"""Checks for the causes of slow training: which parts of a step take too long."""

from __future__ import annotations

import collections
import itertools
import math
import statistics

from concertina.diagnosis import problems
from concertina.diagnosis.evidence import JobEvidence
from concertina.diagnosis.finding import Finding, warning
from concertina.diagnosis.problems import Problem

LEAST_READINGS = 3
"""Minimum number of readings for a judgement of GPU utilization. A single reading covers less than a second."""


def input_bottleneck(evidence: JobEvidence) -> Finding | None:
    return _check_share(
        evidence,
        "input",
        Problem.INPUT_BOTTLENECK,
        problems.INPUT_BOTTLENECK,
        "training waits for data",
        "compare concertina_worker_cpu_seconds_total and concertina_worker_storage_read_bytes_total. If the "
        "reader uses little CPU, it waits for its store: move the data closer or cache them "
        "(trainer.data.cacheSize). If the reader is busy, use more reader processes",
    )


def exposed_communication(evidence: JobEvidence) -> Finding | None:
    return _check_share(
        evidence,
        "communication",
        Problem.EXPOSED_COMMUNICATION,
        problems.EXPOSED_COMMUNICATION,
        f"{evidence.status.world.workers} workers wait for collectives that do not overlap with computation",
        "give each worker more computation between collectives: a larger globalBatchSize, more microbatches, "
        "longer sequences or fewer replicas. Then check the network between the nodes",
    )


def slow_checkpoint(evidence: JobEvidence) -> Finding | None:
    interval = evidence.status.checkpoint_interval
    save_time = f" (a save takes up to {interval.save_seconds:.2g} s)" if interval and interval.save_seconds else ""
    return _check_share(
        evidence,
        "checkpoint",
        Problem.SLOW_CHECKPOINT,
        problems.SLOW_CHECKPOINT,
        f"training waits for snapshots and checkpoints{save_time}",
        "save less often (trainer.snapshot.overhead, checkpoint.everySeconds: Auto), and check that the pods "
        "have memory for two snapshots",
    )


def straggler(evidence: JobEvidence) -> Finding | None:
    """Check whether the coordinator reports stragglers, or whether ranks wait for slower ranks.

    The coordinator is the agent of rank 0.
    """
    share = evidence.window.share("straggler")
    marks = evidence.status.stragglers if not evidence.ended else ()
    if not marks and share < problems.STRAGGLER:
        return None
    for mark in marks[:1]:
        location = f" on node {mark.node}" if mark.node else ""
        description = (
            f"rank {mark.rank} (replica {mark.replica}{location}) takes {mark.seconds:.2g} s of its own work per "
            f"step, and the other ranks take {mark.others_seconds:.2g} s"
        )
        others = f", and {len(marks) - 1} more are slow" if len(marks) > 1 else ""
        advice = (
            f"check what else runs on {mark.node or 'its node'}, the CPU limit and throttling of the pod, and "
            "the clocks of its GPU. With failurePolicy.onStraggler: Replace, the operator moves the replica to "
            "another node without losing a step"
        )
        return warning(
            Problem.STRAGGLER,
            f"{description}{others}; {_percent(evidence, 'straggler')}",
            advice,
            _lost(evidence, share),
        )
    return warning(
        Problem.STRAGGLER,
        f"ranks wait for the slowest of them: {_percent(evidence, 'straggler')}",
        "no rank is always the slowest: the lengths of samples may differ (set trainer.data.balance: Speed), or "
        "nodes are shared. Set metrics.perRank to compare the CPU time of ranks",
        _lost(evidence, share),
    )


def low_mfu(evidence: JobEvidence) -> Finding | None:
    progress = evidence.status.progress
    if not evidence.trains or progress is None or progress.mfu is None or progress.mfu >= problems.LOW_MFU:
        return None
    return warning(
        Problem.LOW_MFU,
        f"{progress.mfu:.0%} of the devices' peak arithmetic is used in the last steps; {problems.LOW_MFU:.0%} or more "
        "is usual",
        "fix the other findings first. Then try larger microbatches, bf16 and compiled attention. `concertina "
        "trace` shows what the devices do in a step",
        1 - progress.mfu / problems.LOW_MFU,
    )


def low_gpu_utilization(evidence: JobEvidence) -> Finding | None:
    """Check whether the GPUs of a job without an MFU (model FLOPs utilization) are idle.

    The check needs at least three readings of a replica's metrics.
    """
    progress = evidence.status.progress
    readings = collections.defaultdict[str, list[tuple[float, ...]]](list)
    for figures in evidence.agents:
        if figures.gpu_utilization:
            readings[figures.replica].append(figures.gpu_utilization)
    known = progress is not None and progress.mfu is not None
    if not evidence.trains or known or max(map(len, readings.values()), default=0) < LEAST_READINGS:
        return None
    # The busiest replica counts, because standby replicas have idle GPUs.
    finite = ([*filter(math.isfinite, itertools.chain(*of_replica))] for of_replica in readings.values())
    typical = max(map(statistics.mean, filter(None, finite)), default=1.0)
    if typical >= problems.LOW_GPU_UTILIZATION:
        return None
    return warning(
        Problem.LOW_GPU_UTILIZATION,
        f"the GPUs of the busiest replica run kernels for {typical:.0%} of the time; "
        f"{problems.LOW_GPU_UTILIZATION:.0%} or more is usual",
        "fix the other findings first. Then see with `concertina trace` what the GPUs wait for: data that the training "
        "process reads, Python code between small kernels, or values that the host reads in each step (.item())",
        1 - typical / problems.LOW_GPU_UTILIZATION,
    )


def _check_share(
    evidence: JobEvidence, name: str, problem: Problem, threshold: float, statement: str, advice: str
) -> Finding | None:
    share = evidence.window.share(name)
    if share < threshold:
        return None
    return warning(problem, f"{statement}: {_percent(evidence, name)}", advice, _lost(evidence, share))


def _percent(evidence: JobEvidence, name: str) -> str:
    return f"{evidence.window.share(name):.0%} of the training in {evidence.window.of}"


def _lost(evidence: JobEvidence, share: float) -> float:
    window = evidence.window
    return share * window.training / window.total if window.total else 0.0
