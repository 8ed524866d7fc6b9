"""Why training is slower than it could be: checks of where the time of steps goes."""

from __future__ import annotations

from concertina.diagnosis import problems
from concertina.diagnosis.evidence import JobEvidence
from concertina.diagnosis.finding import Finding, warning
from concertina.diagnosis.problems import Problem


def input_bottleneck(seen: JobEvidence) -> Finding | None:
    return _of_class(
        seen,
        "input",
        Problem.INPUT_BOTTLENECK,
        problems.INPUT_BOTTLENECK,
        "training waits for data",
        "compare concertina_worker_cpu_seconds_total and _storage_read_bytes_total: a reader without processor time "
        "waits for its store, so bring the data nearer or cache them (trainer.data.cacheSize); one that is busy "
        "needs more processes that read",
    )


def exposed_communication(seen: JobEvidence) -> Finding | None:
    return _of_class(
        seen,
        "communication",
        Problem.EXPOSED_COMMUNICATION,
        problems.EXPOSED_COMMUNICATION,
        f"{seen.status.world.workers} workers wait for collectives that no computation hides",
        "give each worker more to compute between two of them: a larger globalBatchSize, more microbatches or longer "
        "sequences, or fewer replicas; then look at the network between the nodes",
    )


def slow_checkpoint(seen: JobEvidence) -> Finding | None:
    every = seen.status.checkpoint_interval
    each = f" (a save takes up to {every.save_seconds:.2g} s)" if every and every.save_seconds else ""
    return _of_class(
        seen,
        "checkpoint",
        Problem.SLOW_CHECKPOINT,
        problems.SLOW_CHECKPOINT,
        f"training waits for snapshots and checkpoints{each}",
        "save less often (trainer.snapshot.overhead, checkpoint.everySeconds: Auto), and see that the pods' memory "
        "has room for two snapshots",
    )


def straggler(seen: JobEvidence) -> Finding | None:
    """Named by the coordinator, or told by what ranks wait."""
    share = seen.window.share("straggler")
    marks = seen.status.stragglers if not seen.ended else ()
    if not marks and share < problems.STRAGGLER:
        return None
    for mark in marks[:1]:
        where = f" on node {mark.node}" if mark.node else ""
        who = (
            f"rank {mark.rank} (replica {mark.replica}{where}) takes {mark.seconds:.2g} s of own work a step, the "
            f"others {mark.others_seconds:.2g} s"
        )
        more = f", and {len(marks) - 1} more are slow" if len(marks) > 1 else ""
        advice = (
            f"look at what else runs on {mark.node or 'its node'}, at the pod's processor limit and throttling and its "
            "GPU's clocks; failurePolicy.onStraggler: Replace moves it to another node without losing a step"
        )
        return warning(Problem.STRAGGLER, f"{who}{more}; {_percent(seen, 'straggler')}", advice, _lost(seen, share))
    return warning(
        Problem.STRAGGLER,
        f"ranks wait for the slowest of them: {_percent(seen, 'straggler')}",
        "no rank is slow all the time: lengths of samples may differ much (trainer.data.balance: Speed), or nodes are "
        "shared; set metrics.perRank to compare processor times",
        _lost(seen, share),
    )


def low_mfu(seen: JobEvidence) -> Finding | None:
    progress = seen.status.progress
    if not seen.trains or progress is None or progress.mfu is None or progress.mfu >= problems.LOW_MFU:
        return None
    return warning(
        Problem.LOW_MFU,
        f"{progress.mfu:.0%} of the devices' peak arithmetic is used in the last steps; {problems.LOW_MFU:.0%} or more "
        "is usual",
        "mend what else is found first; then larger microbatches, bf16 and compiled attention; `concertina "
        "trace` shows what the devices do in a step",
        1 - progress.mfu / problems.LOW_MFU,
    )


def _of_class(
    seen: JobEvidence, name: str, problem: Problem, threshold: float, what: str, advice: str
) -> Finding | None:
    share = seen.window.share(name)
    if share < threshold:
        return None
    return warning(problem, f"{what}: {_percent(seen, name)}", advice, _lost(seen, share))


def _percent(seen: JobEvidence, name: str) -> str:
    return f"{seen.window.share(name):.0%} of the training in {seen.window.of}"


def _lost(seen: JobEvidence, share: float) -> float:
    window = seen.window
    return share * window.training / window.total if window.total else 0.0
