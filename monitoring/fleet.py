"""Dashboard of all jobs: their progress, where their time and money go, and which of them fail or wait."""

from __future__ import annotations

from monitoring.boards import Board, Kind, Panel, Query, Section, Unit, Variable
from monitoring.promql import RECENT, TIME, UNKNOWN, grown, grown_from_nothing, of_jobs

CHOSEN = 'namespace=~"$namespace"'
NAMES = "{{namespace}}/{{trainingjob}}"


def _sum(expression: str, *labels: str) -> str:
    return f"sum by ({', '.join(labels)}) ({expression})" if labels else f"sum ({expression})"


def _job(name: str, *labels: str, more: str = "") -> str:
    return of_jobs(f"concertina_trainingjob_{name}", *labels, where=CHOSEN + more)


def _time(classes: str) -> str:
    return of_jobs(TIME, "class", where=f"{CHOSEN}, {classes}")


_FORWARD = 'class=~"productive|communication"'
_KNOWN = f'class!~"suspended|{UNKNOWN}"'


def _of_known_goodput(classes: str) -> str:
    """Return an expression for the seconds of only those jobs that have a goodput.

    The waiting and recovery of other jobs would make the total goodput too low.
    """
    return _sum(f"{_time(classes)} and on (namespace, trainingjob) {_job('goodput_ratio')}")


FLEET = Board(
    "fleet",
    "All jobs: their goodput, the use of time and money, failures, and waiting jobs.",
    (Variable("namespace", "concertina_trainingjob_info", several=True),),
    (
        Section(
            "Overview",
            (
                Panel(
                    "Goodput of all jobs",
                    "Part of the time that went into new steps. Suspended time and jobs with unknown "
                    "goodput are left out.",
                    (Query(f"{_of_known_goodput(_FORWARD)} / {_of_known_goodput(_KNOWN)}", "goodput"),),
                    Unit.RATIO,
                    Kind.STAT,
                    6,
                ),
                Panel(
                    "Replicas",
                    "Wanted replicas, ready replicas, and members of a round.",
                    (
                        Query(_sum(_job("wanted_replicas")), "wanted"),
                        Query(_sum(_job("replicas")), "there"),
                        Query(_sum(_job("ready_replicas")), "training"),
                    ),
                    kind=Kind.STAT,
                    width=6,
                ),
                Panel(
                    "Total cost",
                    "Cost of jobs with spec.price.",
                    (Query(_sum(_job("cost", "currency"), "currency"), "{{currency}}"),),
                    kind=Kind.STAT,
                    width=6,
                ),
                Panel(
                    "Jobs that need your action",
                    "Jobs that have failed or need a person, by the reason of the condition Stalled or Degraded.",
                    (Query(f"{_sum(_job('stalled', 'reason'), 'reason')} or vector(0)", "{{reason}}"),),
                    kind=Kind.STAT,
                    width=6,
                ),
                Panel(
                    "Jobs",
                    "One row for each job. The dashboard of a job shows more.",
                    (
                        Query(_job("phase", "phase"), "is"),
                        Query(_job("goodput_ratio"), "goodput"),
                        Query(_job("mfu_ratio"), "MFU"),
                        Query(_job("step"), "step"),
                        Query(_job("loss"), "loss"),
                        Query(_job("tokens_per_second"), "tokens/s"),
                        Query(_job("ready_replicas"), "training"),
                        Query(_job("wanted_replicas"), "wanted"),
                        Query(_job("failures_total"), "failures"),
                        Query(_job("checkpoint_age_seconds"), "checkpoint, s ago"),
                    ),
                    kind=Kind.TABLE,
                    width=16,
                ),
                Panel(
                    "Alerts that fire",
                    "Alerts of concertina. Each one links its runbook.",
                    (Query('ALERTS{alertname=~"Concertina.*", alertstate="firing"}', "fires"),),
                    kind=Kind.TABLE,
                ),
            ),
        ),
        Section(
            "Over time",
            (
                Panel(
                    "Jobs by status",
                    "Number of jobs by status, as in the column Status.",
                    (Query("max by (phase) (concertina_trainingjobs)", "{{phase}}"),),
                    kind=Kind.STACKED,
                ),
                Panel(
                    "Where the time goes",
                    "Seconds of all jobs in the last minutes, by class.",
                    (Query(_sum(grown(TIME, "class", where=CHOSEN, window=RECENT), "class"), "{{class}}"),),
                    Unit.SECONDS,
                    Kind.STACKED,
                ),
                Panel(
                    "Recovery by cause",
                    "Seconds in the last minutes from a failure or a change of members to the next step, by cause.",
                    (
                        Query(
                            _sum(
                                grown_from_nothing(
                                    "concertina_trainingjob_recovery_seconds_total",
                                    "cause",
                                    where=CHOSEN,
                                    window=RECENT,
                                ),
                                "cause",
                            ),
                            "{{cause}}",
                        ),
                    ),
                    Unit.SECONDS,
                    Kind.STACKED,
                ),
                Panel(
                    "Goodput",
                    "Goodput of each job since it was created. Jobs that report no steps have none.",
                    (Query(_job("goodput_ratio"), NAMES),),
                    Unit.RATIO,
                ),
                Panel("MFU", "MFU of each job that reports it.", (Query(_job("mfu_ratio"), NAMES),), Unit.RATIO),
                Panel(
                    "Failures in the window",
                    "Failures within failurePolicy.windowSeconds, by reason.",
                    (Query(_sum(_job("failures_in_window", "reason"), "reason"), "{{reason}}"),),
                    kind=Kind.STACKED,
                ),
                Panel(
                    "Waiting jobs",
                    "Wanted replicas that don't train, of jobs that are running.",
                    (
                        Query(
                            f"({_job('wanted_replicas')} - {_job('ready_replicas')} > 0) unless on (namespace, "
                            'trainingjob) concertina_trainingjob_phase{phase=~"Complete|Failed|Suspended"}',
                            NAMES,
                        ),
                    ),
                ),
                Panel(
                    "Restarts left",
                    "Failures that each job can still have in its window before it fails.",
                    (Query(_job("restarts_remaining"), NAMES),),
                ),
                Panel(
                    "Cost of a million tokens",
                    "Cost of jobs with spec.price that report tokens.",
                    (Query(_job("cost_per_million_tokens", "currency"), f"{NAMES} {{{{currency}}}}"),),
                ),
            ),
        ),
    ),
)
