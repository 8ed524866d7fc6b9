"""Terminal views of TrainingJobs: functions from API objects to rich renderables. Pure."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence

from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from concertina.amounts import amount
from concertina.api import loss_history
from concertina.api.accounting import Cost, Goodput, Incident
from concertina.api.status import CheckpointEvery, Condition, ConditionType, JobProgress, JobStatus, unix_seconds
from concertina.api.world import World
from concertina.durations import duration
from concertina.kube.parse.views import other_manager, status_of
from concertina.kube.resources import Raw
from concertina.terminal import advice, curves, unserved
from concertina_protocol import FailureReason, MemberState, Report, State
from concertina_protocol.messages.ranges import words

UNSERVED = "Unserved"
COLOURS = {
    UNSERVED: "red",
    "Failed": "red",
    "Stalled": "red",
    "Complete": "green",
    "Training": "green",
    "Suspended": "dim",
    "Queued": "yellow",
}
_TIME_COLOURS = {"productive": "green", "communication": "green", "unknown": "dim", "suspended": "dim"}
ENDED = ("Complete", "Failed")
EVENT_COLUMNS = ("Event", "", "Reason", "Ago", "Message")
READ_MODELS = ("model.from", "model.hf")
"""Names of settings in `status.settings` whose value is the model that the trainer has read."""
_SHARES, _CAUSES, _EVENTS = 4, 5, 8
_BAR = 30
"""Maximum length of a bar in characters."""


def word(status: JobStatus) -> str:
    """Return the job's phase as one word, as in the Status column of `kubectl get`."""
    return status.phase or "Unseen"


def said(status: JobStatus) -> str:
    """Return the message of the condition that describes the job's present state."""
    ready = status.condition("Ready")
    return f"{ready.reason}: {ready.message}" if ready else "nothing yet"


def ended(status: JobStatus) -> Condition | None:
    """Return the condition Complete or Failed if it is true, otherwise None."""
    return next((c for c in status.conditions if c.type in ENDED and c.status == "True"), None)


def age(timestamp: str | None) -> str:
    return duration(time.time() - unix_seconds(timestamp)) if timestamp else ""


def table(jobs: Iterable[Raw], with_namespace: bool) -> Table:
    """Return a table with one row for each of the given jobs."""
    names = ["Name", "Status", "World", "Step", "Progress", "ETA", "Loss", "Checkpoint", "Failures", "Age"]
    result = Table(
        *(["Namespace"] if with_namespace else []), *names, box=None, header_style="bold", padding=(0, 2, 0, 0)
    )
    for job in jobs:
        status = status_of(job)
        progress = status.progress
        shown = UNSERVED if unserved.sentence(job, status, time.time()) else word(status)
        cells = [
            job["metadata"]["name"],
            Text(shown, style=COLOURS.get(shown, "yellow")),
            status.world.size,
            str(progress.step) if progress else "",
            f"{progress.percent:.0f}%" if progress and progress.percent is not None else "",
            duration(progress.eta_seconds) if progress and progress.eta_seconds is not None else "",
            f"{progress.loss:.4g}" if progress and progress.loss is not None else "",
            age(status.last_checkpoint.at) if status.last_checkpoint else "",
            str(status.restarts.total),
            age(job["metadata"]["creationTimestamp"]),
        ]
        result.add_row(*([job["metadata"]["namespace"]] if with_namespace else []), *cells)
    return result


def detail(job: Raw, events: Sequence[Raw] = ()) -> RenderableType:
    """Return a view with all details of one job.

    Args:
        job: Object of the job.
        events: Events about the job, in any order.
    """
    status, meta = status_of(job).counted_until(time.time()), job["metadata"]
    rows = Table.grid(padding=(0, 2))
    rows.add_column(style="bold")
    for name, value in _rows(status, job):
        rows.add_row(name, value)
    no_operator = unserved.sentence(job, status, time.time())
    title = Text.assemble((f"{meta['namespace']}/{meta['name']}  ", "bold"), _state(status, no_operator))
    parts: list[RenderableType] = [title, rows]
    if status.conditions:
        parts.append(_conditions(status))
    if events:
        parts.append(_events_table(events))
    failure, running = status.last_failure, status.condition(ConditionType.RUNNING)
    if failure and failure.last_lines and not (running and running.status == "True"):
        more = f"; for more, run kubectl logs {failure.replica} while the pod exists"
        source = f"{failure.replica}{more}" if failure.replica else "the worker"
        parts.append(Text(f"The last lines of {source}:"))
        parts += [Text(f"  {line}") for line in failure.last_lines]
    if not no_operator:  # The advice assumes that an operator manages the job.
        parts.append(Text.assemble(("Next  ", "bold"), advice.next_step(meta["name"], status)))
    return Group(*parts)


def members(world: World, pods: Mapping[str, Raw], report: Report | None) -> Table:
    """Return a table with one row per member of the round, in order of rank.

    Args:
        world: Current members of the job.
        pods: Pods of the job by name.
        report: Last report of the coordinator (the agent of rank 0), or None. A report from another round is ignored.
    """
    names = ["Ranks", "Replica", "Node", "Pod", "State", "Step"]
    result = Table(*names, box=None, header_style="bold", padding=(0, 2, 0, 0))
    reported = report.members if report and report.round == world.round else {}
    first = 0
    for member in world.members:
        pod, state = pods.get(member.replica, {}), reported.get(member.replica)
        is_current = bool(pod) and member.is_pod(pod["metadata"]["uid"])
        last = first + max(0, member.workers - 1)
        result.add_row(
            f"{first}" if first == last else f"{first}-{last}",
            member.replica,
            pod["spec"].get("nodeName") or "" if is_current else member.node,
            pod.get("status", {}).get("phase", "") if is_current else Text("Gone", style="red"),
            _activity(state) if state else "",
            _step(state, report) if state and report else "",
        )
        first += member.workers
    return result


def _step(member: MemberState, coordinator: Report) -> str:
    """Return a member's step as text.

    If the member has ended, this is the step of its own last report. While the member runs, it is the step of rank 0,
    which the coordinator (the agent of rank 0) reports.
    """
    if member.step is not None:
        return f"{member.step}"
    return f"{coordinator.progress.step}" if coordinator.progress and member.state == State.RUNNING else ""


def _activity(member: MemberState) -> str:
    if member.failure:
        return f"{member.state}: {member.failure.message}"
    return f"{member.state}, has {member.notice:g} s left" if member.notice is not None else f"{member.state}"


def _state(status: JobStatus, no_operator: str) -> Text:
    if no_operator:
        return Text.assemble((UNSERVED, "red"), f"  {no_operator}.")
    ready = status.condition(ConditionType.READY)
    style = COLOURS.get(word(status), "yellow")
    message = ready.message if ready else "the operator has not seen it yet"
    return Text.assemble((word(status), style), f"  {message}")


def _world_rows(status: JobStatus, job: Raw) -> Iterable[tuple[str, RenderableType]]:
    """Yield the rows about the job's members, queue, gang and standby replicas."""
    world = status.world
    nodes = {member.node for member in world.members if member.node}
    where = f" on {amount(len(nodes), 'node')}" if nodes or not world.members else ""
    yield (
        "World",
        (
            f"{world.size or '0/' + str(job['spec']['replicas'])}  {amount(world.workers, 'worker')}{where}, "
            f"round {world.round}"
            + (f", coordinator {world.coordinator}" if world.coordinator else "")
            + _since(world.since)
        ),
    )
    if queue := status.queue:
        quota = f"{queue.name}: quota for {amount(queue.replicas, 'replica')}"
        yield "Queue", quota + (f"; {queue.message}" if queue.message else "")
    if gang := status.gang:
        pods = f"{gang.mechanism}: {amount(gang.min_count, 'pod')} together" if gang.mechanism else "none"
        yield "Gang", pods + (f"; {gang.message}" if gang.message else "")
    if world.layout:
        yield "Layout", world.layout + (f"; {world.cross_domain_groups}" if world.cross_domain_groups else "")
    if standing := status.standby_replicas.names:
        yield "Standby", f"{status.standby_replicas.ready} of {len(standing)} ready: {', '.join(standing[:5])}"


def _rows(status: JobStatus, job: Raw) -> Iterable[tuple[str, RenderableType]]:
    if manager := other_manager(job):
        yield "Managed by", f"{manager} (spec.managedBy), so concertina's operator leaves it alone"
    yield from _world_rows(status, job)
    if progress := status.progress:
        yield "Progress", _progress(status)
        pace = progress.tokens_per_second if status.is_true(ConditionType.RUNNING) else None
        eta = progress.eta_seconds if status.is_true(ConditionType.RUNNING) else None
        numbers = {
            "loss": f"{progress.loss:.4g}" if progress.loss is not None else "",
            "tokens/s": f"{pace:,.0f}" if pace is not None else "",
            "ETA": duration(eta) if eta is not None else "",
            "evaluation loss": _evaluation(progress),
            "MFU": mfu(progress),
        }
        yield "", "  ".join(f"{name} {value}" for name, value in numbers.items() if value)
    yield from _curves(status)
    if snapshot := status.last_snapshot:
        yield "Snapshot", f"step {snapshot.step}, {age(snapshot.at)} ago{snapshots_every(status)}"
    if checkpoint := status.last_checkpoint:
        yield "Checkpoint", f"step {checkpoint.step}, {age(checkpoint.at)} ago, {checkpoint.uri}"
    if best := status.best_checkpoint:
        yield "Best", f"step {best.step}, evaluation loss {best.loss:.4g}, {best.uri}"
    for made in status.evaluation_jobs:
        why = f": {made.message}" if made.message else ""
        yield "Evaluation job", f"{made.name} (step {made.step}) {made.state.value}{why}"
    yield from _checkpoint_rows(status)
    for mark in status.stragglers:
        yield (
            "Straggler",
            f"rank {mark.rank}, {mark.replica} on {mark.node}: {mark.seconds:.2g} s of its own work per step, "
            f"and the other ranks {mark.others_seconds:.2g} s" + _since(mark.since),
        )
    if status.batch_assignment:
        shares = (
            f"{mark.replica} {mark.sequences} ({mark.factor:.2f} of an even share)"
            for mark in status.batch_assignment[:_SHARES]
        )
        more = ", ..." if len(status.batch_assignment) > _SHARES else ""
        yield "Shares", f"sequences per step, smallest share first: {', '.join(shares)}{more}"
    for setting in status.settings:
        if setting.field in READ_MODELS:
            yield "Model", f"{setting.value} ({setting.field})"
    if chosen := [f"{each.field} {each.value}" for each in status.settings if each.field not in READ_MODELS]:
        yield "Chosen", ", ".join(chosen)
    restarts = status.restarts
    yield (
        "Failures",
        (
            f"{restarts.total} ({restarts.in_window} in the window, {restarts.budget} more allowed), rounds "
            f"{status.rounds}, steps replayed {status.steps_replayed}"
        ),
    )
    if answers := [f"{use.action} {use.in_window}" for use in restarts.recovery_actions]:
        yield "", f"answered in the window by {', '.join(answers)}"
    if failure := status.last_failure:
        where = f"{failure.replica} on {failure.node}, " if failure.replica else ""
        yield "Last failure", f"{where}round {failure.round}, {age(failure.at)} ago: {failure.reason}"
    for node in () if ended(status) else status.avoided_nodes:
        if (remaining_seconds := unix_seconds(node.until) - time.time()) > 0:
            yield "Avoids", f"node {node.node} for {duration(remaining_seconds)} more: {node.reason}"
    if status.goodput.at:
        useful = status.goodput.tokens_per_second
        speed = f", {useful:,.0f} useful tokens/s" if useful else ""
        yield "Goodput", f"{goodput(status.goodput)}{speed}"
        yield "Time", _time_bars(status.goodput)
        if spent := recovery_spent(status.goodput):
            yield "", f"recovery by cause: {spent}"
    if status.incidents:
        yield "Last incident", incident(status.incidents[-1], status.cost)
    if cost := status.cost:
        yield "Cost", _cost(cost)


def _checkpoint_rows(status: JobStatus) -> Iterable[tuple[str, str]]:
    """Yield the rows about checkpoint intervals, damaged checkpoints, rollbacks and skipped samples."""
    if interval := status.checkpoint_interval:
        yield "", checkpoints_every(interval, status.restarts.total)
    for damaged in (status.damaged_checkpoints or ())[-1:]:
        consequence = f"training continued from step {damaged.previous_step} or an earlier one"
        yield "Damaged", f"{age(damaged.at)} ago, {damaged.uri} (step {damaged.step}): {consequence}"
    if (rollback := status.rollback) and rollback.reason != FailureReason.DAMAGED:
        where = f"from round {rollback.round} to step {rollback.step} or an earlier one"
        yield "Rolled back", f"{age(rollback.at)} ago, {where}: {rollback.message}"
    if status.skipped:
        yield "Left out", words(tuple((stretch.begin, stretch.end) for stretch in status.skipped))


def snapshots_every(status: JobStatus) -> str:
    """Return text on the snapshot interval and its cost, to append to the newest snapshot; empty if unknown."""
    interval = status.snapshot_interval
    if interval is None:
        return ""
    steps = "every step" if interval.steps <= 1 else f"every {interval.steps} steps"
    return f"; {steps}, {interval.overhead:.1%} of the training time"


def checkpoints_every(every: CheckpointEvery, failures: int) -> str:
    """Return a sentence with the checkpoint interval, and the best interval for the number of failures so far."""
    clock = f"every {duration(every.seconds)} by the clock" if every.seconds else "by steps alone"
    if not failures:
        return clock
    best = f"the best interval is {duration(every.suggested_seconds)}"
    cost, between = f"{every.save_seconds:.2g} s", duration(every.failure_seconds)
    return f"{clock}; {best} (a save costs {cost}, a failure comes every {between})"


def _since(timestamp: str | None) -> str:
    return f", since {age(timestamp)}" if timestamp else ""


def _progress(status: JobStatus) -> RenderableType:
    progress = status.progress
    assert progress is not None
    if progress.optimizer:
        return (
            f"{progress.step} steps of {progress.optimizer} since the start of the workers; the step of the "
            "run is unknown"
        )
    if not progress.steps:
        return f"step {progress.step}"
    line = Table.grid(padding=(0, 1))
    bar = ProgressBar(total=progress.steps, completed=progress.step, width=30)
    line.add_row(bar, f"{progress.percent or 0:.0f}%", f"step {progress.step} of {progress.steps}")
    return line


def mfu(progress: JobProgress) -> str:
    """Return the model FLOPs utilization as text, by both usual conventions; empty if it is unknown."""
    full = progress.mfu_full_attention
    also = f" ({full:.1%} with all of attention counted)" if full else ""
    return f"{progress.mfu:.1%}{also}" if progress.mfu else ""


def _evaluation(progress: JobProgress) -> str:
    """Return the figures of the last evaluation as text; empty if there are none."""
    mark = progress.evaluation
    if mark is None or mark.loss is None:
        return ""
    figures = [
        form.format(value)
        for form, value in (
            ("perplexity {:.4g}", mark.perplexity),
            ("token accuracy {:.1%}", mark.token_accuracy),
            ("{:.4g} bits per byte", mark.bits_per_byte),
        )
        if value is not None
    ]
    beside = f" ({', '.join(figures)})" if figures else ""
    others = "".join(f"; {one.name} {one.loss:.4g}" for one in mark.sets[1:] if one.loss is not None)
    return f"{mark.loss:.4g}{beside} at step {mark.step}{others}"


def _curves(status: JobStatus) -> Iterable[tuple[str, str]]:
    """Yield the rows with the curves of the loss and of the number of replicas."""
    history = loss_history.unpacked(status.history) if status.history else loss_history.LossHistory()
    if len(history.points) < 2:
        return
    elapsed = duration(history.points[-1].at - history.points[0].at)
    losses = [point.loss for point in history.points if point.loss is not None]
    if losses:
        yield "Loss", f"{curves.loss(history)}  {losses[0]:.4g} to {losses[-1]:.4g} in {elapsed}"
    sizes = [point.replicas for point in history.points]
    yield "Replicas", f"{curves.world(history)}  {min(sizes)} to {max(sizes)} in {elapsed}"


def _time_bars(goodput: Goodput) -> Table:
    """Return a table with one bar per class of the job's time (such as recovery), the longest first."""
    parts = sorted(goodput.by_class.items(), key=lambda part: -part[1])
    total, longest = sum(goodput.by_class.values()) or 1.0, parts[0][1] or 1.0
    result = Table.grid(padding=(0, 1))
    for name, seconds in parts:
        if seconds >= 0.5:
            bar = "█" * max(1, round(seconds / longest * _BAR))
            result.add_row(
                name, duration(seconds), f"{seconds / total:.1%}", Text(bar, style=_TIME_COLOURS.get(name, "yellow"))
            )
    return result


def _events_table(events: Sequence[Raw]) -> Table:
    """Return a table of the last events.

    The events' text is not interpreted as markup, because anyone may have written it.
    """
    result = Table(*EVENT_COLUMNS, box=None, header_style="bold", pad_edge=False)
    for row in last_events(events):
        result.add_row(*map(Text, row))
    return result


def last_events(events: Sequence[Raw]) -> Iterable[tuple[str, ...]]:
    """Yield the cells of the last events in the order of EVENT_COLUMNS, newest last."""
    for event in sorted(events, key=lambda event: str(event.get("lastTimestamp") or ""))[-_EVENTS:]:
        times = event.get("count") or 1
        yield (
            str(event.get("type") or ""),
            f"{times} x" if times > 1 else "",
            str(event.get("reason") or ""),
            age(event.get("lastTimestamp")),
            " ".join(str(event.get("message") or "").split()),
        )


def goodput(spent: Goodput) -> str:
    """Return a sentence with the goodput (the percentage of time in which new steps were made)."""
    if spent.at is None:
        return "not counted yet"
    if spent.percent is None:
        return "unknown: the script has reported no step (see docs/accounting.md)"
    apart = "suspended and unknown time" if spent.unknown_seconds else "suspended time"
    return f"{spent.percent:.1f}% of the time was spent on new steps ({apart} excluded)"


def recovery_spent(goodput: Goodput) -> str:
    """Return text with the time that recovery took for each cause, the largest first."""
    causes = sorted(goodput.recovery, key=lambda entry: -entry.seconds)[:_CAUSES]
    at_least = "at least " if goodput.percent is None else ""
    return ", ".join(f"{entry.cause} {entry.times} x, {at_least}{entry.seconds:.1f}s" for entry in causes)


def incident(entry: Incident, cost: Cost | None) -> str:
    """Return a sentence with the time, cause and cost of an incident."""
    at_least = "at least " if entry.at_least else ""
    source = f" ({entry.replica}" + (f" on {entry.node})" if entry.node else ")") if entry.replica else ""
    steps = f", {amount(entry.steps_replayed, 'step')} trained again ({entry.replayed_seconds:.1f}s)"
    again = steps if entry.steps_replayed else ""
    money = f", {at_least}{entry.cost:.2f} {cost.currency}" if entry.cost is not None and cost else ""
    return f"{age(entry.at)} ago, {entry.cause}{source}: {at_least}{entry.seconds:.1f}s without training{again}{money}"


def _cost(cost: Cost) -> str:
    tokens = cost.per_million_tokens
    token_cost = f", {tokens:.4g} {cost.currency} per million tokens" if tokens is not None else ""
    spot = f", {cost.spot_replica_hours:.1f} of them spot" if cost.spot_replica_hours else ""
    return f"{cost.total:.2f} {cost.currency} for {cost.replica_hours:.1f} replica-hours{spot}{token_cost}"


def _conditions(status: JobStatus) -> Table:
    """Return a table of the conditions that are true or have a message.

    A message that the title already shows is not repeated.
    """
    result = Table("Condition", "", "Reason", "For", "Message", box=None, header_style="bold", pad_edge=False)
    ready = status.condition(ConditionType.READY)
    for condition in status.conditions:
        message = "" if ready and condition.message == ready.message else condition.message
        if condition.status != "False" or message:
            since = age(condition.last_transition_time)
            result.add_row(condition.type, condition.status, condition.reason, since, Text(message))
    return result
