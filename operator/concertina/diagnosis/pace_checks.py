"""Checks for the causes of slow training: which parts of a step take too long."""

from __future__ import annotations

from concertina.diagnosis import problems
from concertina.diagnosis.evidence import JobEvidence
from concertina.diagnosis.finding import Finding, warning
from concertina.diagnosis.problems import Problem


def input_bottleneck(evidence: JobEvidence) -> Finding | None:
    return _check_share(
        evidence,
        "input",
        Problem.INPUT_BOTTLENECK,
        problems.INPUT_BOTTLENECK,
        "training waits for data",
        "compare concertina_worker_cpu_seconds_total and _storage_read_bytes_total: a reader without processor time "
        "waits for its store, so bring the data nearer or cache them (trainer.data.cacheSize); one that is busy "
        "needs more processes that read",
    )


def exposed_communication(evidence: JobEvidence) -> Finding | None:
    return _check_share(
        evidence,
        "communication",
        Problem.EXPOSED_COMMUNICATION,
        problems.EXPOSED_COMMUNICATION,
        f"{evidence.status.world.workers} workers wait for collectives that no computation hides",
        "give each worker more to compute between two of them: a larger globalBatchSize, more microbatches or longer "
        "sequences, or fewer replicas; then look at the network between the nodes",
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
        "save less often (trainer.snapshot.overhead, checkpoint.everySeconds: Auto), and see that the pods' memory "
        "has room for two snapshots",
    )


def straggler(evidence: JobEvidence) -> Finding | None:
    """Check whether the coordinator reports stragglers, or whether ranks wait for slower ranks."""
    share = evidence.window.share("straggler")
    marks = evidence.status.stragglers if not evidence.ended else ()
    if not marks and share < problems.STRAGGLER:
        return None
    for mark in marks[:1]:
        location = f" on node {mark.node}" if mark.node else ""
        description = (
            f"rank {mark.rank} (replica {mark.replica}{location}) takes {mark.seconds:.2g} s of own work a step, the "
            f"others {mark.others_seconds:.2g} s"
        )
        others = f", and {len(marks) - 1} more are slow" if len(marks) > 1 else ""
        advice = (
            f"look at what else runs on {mark.node or 'its node'}, at the pod's processor limit and throttling and its "
            "GPU's clocks; failurePolicy.onStraggler: Replace moves it to another node without losing a step"
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
        "no rank is slow all the time: lengths of samples may differ much (trainer.data.balance: Speed), or nodes are "
        "shared; set metrics.perRank to compare processor times",
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
        "mend what else is found first; then larger microbatches, bf16 and compiled attention; `concertina "
        "trace` shows what the devices do in a step",
        1 - progress.mfu / problems.LOW_MFU,
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
