"""Dashboard of the operator itself: planning passes, requests to the API server, agents, rounds, and its process."""

from __future__ import annotations

from monitoring.boards import Board, Kind, Panel, Query, Section, Unit
from monitoring.promql import RECENT

PASSES = '{controller="trainingjob"}'
OURS = 'and on (instance) leader_election_master_status{name="concertina-operator"}'
"""Selector of the operator's pods, because other processes have metrics of these names too."""


def _rate(metric: str, *labels: str, where: str = "") -> str:
    return f"sum by ({', '.join(labels)}) (rate({metric}{where}[{RECENT}]))"


def _quantiles(metric: str, *labels: str, where: str = "") -> tuple[Query, ...]:
    """Return the queries for the median and the 99th percentile of a histogram."""
    counted = _rate(f"{metric}_bucket", "le", *labels, where=where)
    names = " ".join(f"{{{{{label}}}}}" for label in labels)
    return tuple(
        Query(f"histogram_quantile({part}, {counted})", f"{names} {words}".strip())
        for part, words in ((0.5, "half"), (0.99, "99th percentile"))
    )


def _max(metric: str, *labels: str, where: str = "") -> str:
    return f"max by ({', '.join(labels)}) ({metric}{where})"


OPERATOR = Board(
    "operator",
    "The operator itself: passes, the API server, agents, rounds, and its process.",
    (),
    (
        Section(
            "Passes",
            (
                Panel(
                    "Operators, and the active one",
                    "1 for the operator that holds the Lease.",
                    (Query('leader_election_master_status{name="concertina-operator"}', "{{instance}}"),),
                ),
                Panel(
                    "Jobs",
                    "Number of jobs by status, as in the column Status.",
                    (Query(_max("concertina_trainingjobs", "phase"), "{{phase}}"),),
                    kind=Kind.STACKED,
                ),
                Panel(
                    "Passes",
                    "By result.",
                    (Query(_rate("controller_runtime_reconcile_total", "result", where=PASSES), "{{result}}"),),
                    Unit.PER_SECOND,
                    Kind.STACKED,
                ),
                Panel(
                    "Duration of a pass",
                    "",
                    _quantiles("controller_runtime_reconcile_time_seconds", where=PASSES),
                    Unit.SECONDS,
                ),
                Panel(
                    "Wait before a pass",
                    "",
                    _quantiles("workqueue_queue_duration_seconds", where=PASSES),
                    Unit.SECONDS,
                ),
                Panel(
                    "Work on a pass",
                    "Duration of the work, as measured by the queue.",
                    _quantiles("workqueue_work_duration_seconds", where=PASSES),
                    Unit.SECONDS,
                ),
                Panel(
                    "Queue",
                    "Jobs that wait, passes in progress, and jobs that start to wait per second.",
                    (
                        Query(_max("workqueue_depth", where=PASSES), "wait"),
                        Query(_max("controller_runtime_active_workers", where=PASSES), "under way"),
                        Query(_rate("workqueue_adds_total", where=PASSES), "begin to wait, a second"),
                    ),
                ),
                Panel(
                    "Long passes",
                    "Seconds of all passes in progress, and of the longest one.",
                    (
                        Query(_max("workqueue_unfinished_work_seconds", where=PASSES), "all"),
                        Query(_max("workqueue_longest_running_processor_seconds", where=PASSES), "longest"),
                    ),
                    Unit.SECONDS,
                ),
                Panel(
                    "Passes without a result",
                    "Errors, repeated passes, and passes that an answer of the API server ended.",
                    (
                        Query(_rate("controller_runtime_reconcile_errors_total", where=PASSES), "errors"),
                        Query(_rate("workqueue_retries_total", where=PASSES), "made again"),
                        Query(_rate("concertina_reconcile_aborted_total", "reason"), "{{reason}}"),
                    ),
                    Unit.PER_SECOND,
                ),
            ),
        ),
        Section(
            "API server",
            (
                Panel(
                    "Requests",
                    "Every attempt, by method and resource.",
                    (Query(_rate("rest_client_requests_total", "method", "resource"), "{{method}} {{resource}}"),),
                    Unit.PER_SECOND,
                    Kind.STACKED,
                ),
                Panel(
                    "Responses",
                    "Answers by code. <error> means that there was no answer.",
                    (Query(_rate("rest_client_requests_total", "code"), "{{code}}"),),
                    Unit.PER_SECOND,
                    Kind.STACKED,
                ),
                Panel(
                    "Duration of a request",
                    "Time from the first attempt to the end, without watches.",
                    _quantiles("rest_client_request_duration_seconds", "verb"),
                    Unit.SECONDS,
                ),
                Panel(
                    "Restarted watches",
                    "Watches by resource and the way they ended.",
                    (Query(_rate("concertina_watch_restarts_total", "resource", "reason"), "{{resource}} {{reason}}"),),
                    Unit.PER_SECOND,
                ),
                Panel(
                    "Pods and Secrets refused",
                    "Refusals by the write that must happen first.",
                    (Query(_rate("concertina_create_rejections_total", "kind"), "{{kind}}"),),
                    Unit.PER_SECOND,
                ),
            ),
        ),
        Section(
            "Agents and rounds",
            (
                Panel(
                    "Streams",
                    "Streams that should be open, by state.",
                    (Query(_max("concertina_agent_streams", "state"), "{{state}}"),),
                    kind=Kind.STACKED,
                ),
                Panel(
                    "Ended streams",
                    "By how.",
                    (Query(_rate("concertina_agent_stream_ends_total", "reason"), "{{reason}}"),),
                    Unit.PER_SECOND,
                ),
                Panel(
                    "Calls",
                    "By kind and result.",
                    (Query(_rate("concertina_agent_calls_total", "kind", "result"), "{{kind}} {{result}}"),),
                    Unit.PER_SECOND,
                ),
                Panel(
                    "Rounds",
                    "Seconds until a round starts: prepare (claim to commit) and start (commit to first progress).",
                    _quantiles("concertina_round_duration_seconds", "phase"),
                    Unit.SECONDS,
                ),
                Panel(
                    "Spans of traces",
                    "Spans by result. All are 0 if no collector is configured.",
                    (Query(_rate("concertina_trace_spans_total", "result"), "{{result}}"),),
                    Unit.PER_SECOND,
                ),
                Panel(
                    "Operator's own network suspected",
                    "1 if the operator takes the silence of agents for a fault of its own network.",
                    (Query(_max("concertina_operator_isolated"), "suspected"),),
                ),
                Panel(
                    "Jobs of another operator",
                    "Jobs whose master key this operator lacks, so that it leaves them alone. Two "
                    "installations serve these jobs.",
                    (Query(_max("concertina_jobs_of_another_operator"), "jobs"),),
                ),
            ),
        ),
        Section(
            "Process",
            (
                Panel(
                    "Operator's CPU",
                    "Processors.",
                    (Query(f"rate(process_cpu_seconds_total[{RECENT}]) {OURS}", "{{instance}}"),),
                ),
                Panel(
                    "Operator's memory",
                    "",
                    (Query(f"process_resident_memory_bytes {OURS}", "{{instance}}"),),
                    Unit.BYTES,
                ),
                Panel(
                    "Open files and connections",
                    "Open files and connections, beside their limit.",
                    (
                        Query(f"process_open_fds {OURS}", "{{instance}}"),
                        Query(f"process_max_fds {OURS}", "{{instance}} at most"),
                    ),
                ),
                Panel(
                    "Time without CPU",
                    "Seconds per second in which the process was stopped or had no processor time.",
                    (Query(_rate("concertina_event_loop_stall_seconds_total"), "seconds"),),
                    Unit.SECONDS,
                ),
                Panel(
                    "Components that ended unexpectedly",
                    "Parts of the operator that an unexpected error ended. The log line `part ended` has the error.",
                    (Query(_rate("concertina_background_task_restarts_total", "part"), "{{part}}"),),
                    Unit.PER_SECOND,
                ),
            ),
        ),
    ),
)
