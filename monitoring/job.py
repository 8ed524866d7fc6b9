"""Dashboard of one job: progress, loss, use of time, members, rounds and recovery, checkpoints."""

from __future__ import annotations

from monitoring.boards import Board, Kind, Panel, Query, Section, Unit, Variable
from monitoring.promql import RECENT, TIME, grown, of_jobs

CHOSEN = 'namespace="$namespace", trainingjob="$trainingjob"'
VARIABLES = (
    Variable("namespace", "concertina_trainingjob_info"),
    Variable("trainingjob", 'concertina_trainingjob_info{namespace="$namespace"}'),
)


def _job(name: str, *labels: str) -> str:
    return of_jobs(f"concertina_trainingjob_{name}", *labels, where=CHOSEN)


def _told(name: str, *labels: str) -> str:
    """Return an expression for a metric that rank 0 reports, so that one pod has it at a time."""
    return of_jobs(f"concertina_training_{name}", *labels, where=CHOSEN)


def rate(metric: str, *labels: str) -> str:
    """Return a PromQL expression for the rate of a counter over all pods of the job.

    If the coordinator changes, another pod continues the count.
    """
    return f"sum by ({', '.join(labels)}) (rate({metric}{{{CHOSEN}}}[{RECENT}]))"


def _quantile(part: float) -> str:
    return f"histogram_quantile({part}, {rate('concertina_training_step_seconds_bucket', 'le')})"


def _stat(title: str, name: str, description: str, unit: Unit = Unit.NUMBER) -> Panel:
    return Panel(title, description, (Query(_job(name), title.lower()),), unit, Kind.STAT, 4)


NOW = Section(
    "Overview",
    (
        Panel(
            "Status",
            "Status of the job, as in the column Status.",
            (Query(_job("phase", "phase"), "{{phase}}"),),
            kind=Kind.STAT,
            width=4,
        ),
        _stat("Step", "step", "Steps finished."),
        _stat("Loss", "loss", "Mean loss of the last reported step."),
        _stat(
            "Goodput",
            "goodput_ratio",
            "Part of the time that went into new steps. No data: the script reports no steps.",
            Unit.RATIO,
        ),
        _stat("MFU", "mfu_ratio", "Part of the devices' peak arithmetic.", Unit.RATIO),
        _stat("Last reported step", "progress_age_seconds", "Since then.", Unit.SECONDS),
        Panel(
            "Possible problems",
            "Alerts of this job. Each one links its runbook.",
            (Query(f'ALERTS{{alertname=~"Concertina.*", {CHOSEN}}}', "is"),),
            kind=Kind.TABLE,
            width=12,
        ),
        Panel(
            "Why the job does not continue",
            "Reason of the condition Stalled or Degraded. `concertina status` shows its message.",
            (Query(f"{_job('stalled', 'reason')} or vector(0)", "{{reason}}"),),
            width=12,
        ),
    ),
)
TRAINING = Section(
    "Training",
    (
        Panel(
            "Progress",
            "Number of finished steps. It falls when steps are repeated.",
            (Query(_job("step"), "step"), Query(_job("steps"), "of"), Query(_job("steps_replayed_total"), "replayed")),
        ),
        Panel(
            "Loss over time",
            "Loss of training and of the validation documents.",
            (
                Query(_told("loss"), "training"),
                Query(_told("validation_loss"), "validation"),
                Query(_told("validation_set_loss", "name"), "{{name}}"),
            ),
        ),
        Panel(
            "Validation accuracy over time",
            "Share of the validation tokens that the model predicts correctly.",
            (
                Query(_told("validation_accuracy_ratio"), "validation"),
                Query(_told("validation_set_accuracy_ratio", "name"), "{{name}}"),
            ),
            Unit.RATIO,
        ),
        Panel(
            "Gradient norm and learning rate",
            "Gradient norm and learning rate of the last step.",
            (Query(_told("gradient_norm"), "gradient norm"), Query(_told("learning_rate"), "learning rate")),
        ),
        Panel(
            "Tokens per second",
            "Tokens per second of all workers. Useful tokens count once, over all time without suspensions.",
            (Query(_told("tokens_per_second"), "tokens/s"), Query(_job("useful_tokens_per_second"), "useful")),
        ),
        Panel(
            "MFU over time", "Part of the devices' peak arithmetic.", (Query(_told("mfu_ratio"), "MFU"),), Unit.RATIO
        ),
        Panel(
            "Other reported values",
            "Values that the worker reports under its own names.",
            (Query(_told("metric", "name"), "{{name}}"),),
        ),
    ),
)
TIMES = Section(
    "Where the time goes",
    (
        Panel(
            "Where the time goes",
            "Seconds in the last minutes, by class. They add up to the whole time.",
            (Query(f"sum by (class) ({grown(TIME, 'class', where=CHOSEN, window=RECENT)})", "{{class}}"),),
            Unit.SECONDS,
            Kind.STACKED,
        ),
        Panel(
            "Parts of a step",
            "Seconds per second on rank 0. The remaining time is a wait for other ranks.",
            (Query(rate("concertina_training_step_part_seconds_total", "part"), "{{part}}"),),
            Unit.SECONDS,
            Kind.STACKED,
        ),
        Panel(
            "Step time",
            "Median and 99th percentile.",
            (Query(_quantile(0.5), "half"), Query(_quantile(0.99), "99th percentile")),
            Unit.SECONDS,
        ),
        Panel(
            "Slowest rank relative to the others",
            "Seconds per second in which ranks don't wait for others. A large distance means a straggler.",
            (Query(rate("concertina_training_busy_seconds_total", "of"), "{{of}}"),),
            Unit.SECONDS,
        ),
        Panel(
            "Waits for data and saves",
            "Seconds per second in which training waited.",
            (
                Query(rate("concertina_training_data_wait_seconds_total"), "data"),
                Query(rate("concertina_training_save_wait_seconds_total"), "snapshots and checkpoints"),
            ),
            Unit.SECONDS,
        ),
        Panel(
            "Age of the job",
            "Whole time by class.",
            (Query(of_jobs(TIME, "class", where=CHOSEN), "{{class}}"),),
            Unit.SECONDS,
            Kind.STACKED,
        ),
    ),
)
WORLD = Section(
    "World, rounds and recovery",
    (
        Panel(
            "World",
            "Replicas, and the workers of the round.",
            (
                Query(_job("wanted_replicas"), "wanted"),
                Query(_job("min_replicas"), "minimum"),
                Query(_job("replicas"), "pods"),
                Query(_job("ready_replicas"), "training"),
                Query(_job("standby_replicas_ready"), "standby replicas"),
                Query(_job("world_size"), "workers"),
            ),
        ),
        Panel(
            "Rounds and failures",
            "Since the job was created.",
            (Query(_job("rounds_total"), "rounds"), Query(_job("failures_total"), "failures")),
        ),
        Panel(
            "Failures in the window and restarts left",
            "Failures by reason, and the number of failures before the job fails.",
            (
                Query(_job("failures_in_window", "reason"), "{{reason}}"),
                Query(_job("restarts_remaining"), "left"),
            ),
        ),
        Panel(
            "Recovery by cause",
            "Seconds since the job was created, from a failure or a change of members to the next step.",
            (Query(_job("recovery_seconds_total", "cause"), "{{cause}}"),),
            Unit.SECONDS,
            Kind.STACKED,
        ),
        Panel(
            "Start of the round",
            "Seconds of each part of the start.",
            (Query(_told("start_seconds", "part"), "{{part}}"),),
            Unit.SECONDS,
            Kind.STACKED,
        ),
        Panel(
            "Stragglers and avoided nodes",
            "Ranks that the other ranks wait for, and nodes that new pods avoid.",
            (Query(_job("stragglers"), "stragglers"), Query(_job("avoided_nodes"), "avoided nodes")),
        ),
    ),
)
SAVED = Section(
    "Checkpoints, tracking and money",
    (
        Panel(
            "Age of saved states",
            "Age of the newest saved states, beside the interval of checkpoints.",
            (
                Query(_job("checkpoint_age_seconds"), "checkpoint"),
                Query(_job("checkpoint_waited_seconds"), "waited for the next"),
                Query(_job("checkpoint_interval_seconds"), "interval"),
                Query(_job("snapshot_age_seconds"), "snapshot"),
            ),
            Unit.SECONDS,
        ),
        Panel(
            "Saved steps",
            "Steps to which the job would go back if it lost all replicas, or one.",
            (
                Query(_job("step"), "now"),
                Query(_job("checkpoint_step"), "checkpoint"),
                Query(_told("snapshot_step"), "snapshot"),
            ),
        ),
        Panel(
            "To durable storage",
            "Bytes per second of all replicas.",
            (Query(rate("concertina_checkpoint_shipped_bytes_total"), "bytes/s"),),
            Unit.BYTES_PER_SECOND,
        ),
        Panel(
            "Uploads",
            "Shards per second, requests that storage refused, and seconds per second of uploads.",
            (
                Query(rate("concertina_checkpoint_shards_shipped_total"), "shards"),
                Query(rate("concertina_checkpoint_storage_failures_total"), "refused"),
                Query(rate("concertina_checkpoint_ship_seconds_total"), "seconds"),
            ),
        ),
        Panel(
            "Slowest snapshot",
            "Snapshots of this round.",
            (Query(_told("slowest_save_seconds"), "seconds"),),
            Unit.SECONDS,
        ),
        Panel(
            "Tracker",
            "1 if the tracker of spec.tracking accepts no records.",
            (Query(_job("tracker_unreachable"), "unreachable"),),
        ),
        Panel(
            "Cost",
            "Cost by spec.price: so far, and for a million tokens.",
            (
                Query(_job("cost", "currency"), "{{currency}} so far"),
                Query(_job("cost_per_million_tokens", "currency"), "{{currency}} for a million tokens"),
            ),
        ),
    ),
)
JOB = Board(
    "job",
    "One job: progress, loss, use of time, members, rounds and recovery, checkpoints.",
    VARIABLES,
    (NOW, TRAINING, TIMES, WORLD, SAVED),
)
