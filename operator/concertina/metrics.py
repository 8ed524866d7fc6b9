"""Metrics of the operator.

All metrics are defined here. docs/reference/metrics.md lists them, and docs/metrics.md explains their labels. Code that
performs an action updates the metric of that action. If controller-runtime or client-go has the same metric, the name
and the buckets are the same (decision "Metric names follow controller-runtime"). No label contains the name of a job, a
namespace or a node.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector

CONTROLLER = "trainingjob"
NO_ANSWER = "<error>"
"""Value of the label `code` for a request without a response, as in client-go."""
_RECONCILE_BUCKETS = (
    *(0.005, 0.01, 0.025, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.35, 0.4, 0.45, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.25, 1.5),
    *(1.75, 2.0, 2.5, 3.0, 3.5, 4.0, 4.5, 5.0, 6.0, 7.0, 8.0, 9.0, 10.0, 15.0, 20.0, 25.0, 30.0, 40.0, 50.0, 60.0),
)
_QUEUE_BUCKETS = tuple(10.0**power for power in range(-8, 4))
_REQUEST_BUCKETS = (0.005, 0.025, 0.1, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 15.0, 30.0, 60.0)
_ROUND_BUCKETS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 15.0, 30.0, 60.0, 120.0, 300.0, 600.0)

REGISTRY = CollectorRegistry()
ProcessCollector(registry=REGISTRY)


def begin_at_zero(metric: Counter, *values: Iterable[str]) -> None:
    """Create the series of all combinations of label values, with the value zero.

    Prometheus shows no increase for the first event of a series if the series did not exist before.

    Args:
        metric: Counter whose series are created.
        *values: All values of each label, in the order of the counter's labels.
    """
    for labels in itertools.product(*values):
        metric.labels(*labels)


def set_all(metric: Gauge, counts: Mapping[str, int]) -> None:
    """Set all series of a gauge that has one label.

    Args:
        metric: Gauge to set.
        counts: New value for each value of the label. All label values are required.
    """
    for label, count in counts.items():
        metric.labels(label).set(count)


# --- passes and their queue, as controller-runtime has them ---------------------------------------------------------

_RECONCILES = Counter(
    "controller_runtime_reconcile",
    "Passes over jobs, by result: success (the next pass follows a change), requeue_after (the next pass "
    "follows a delay), error.",
    ["controller", "result"],
    registry=REGISTRY,
)
SUCCESSES = _RECONCILES.labels(CONTROLLER, "success")
REQUEUES = _RECONCILES.labels(CONTROLLER, "requeue_after")
ERRORS = _RECONCILES.labels(CONTROLLER, "error")
RECONCILE_ERRORS = Counter(
    "controller_runtime_reconcile_errors",
    "Passes that raised an error. The job's condition ReconcileError says what to do.",
    ["controller"],
    registry=REGISTRY,
).labels(CONTROLLER)
RECONCILE_SECONDS = Histogram(
    "controller_runtime_reconcile_time_seconds",
    "Duration of a pass in seconds.",
    ["controller"],
    buckets=_RECONCILE_BUCKETS,
    registry=REGISTRY,
).labels(CONTROLLER)
ACTIVE_WORKERS = Gauge(
    "controller_runtime_active_workers",
    "Passes in progress, at most one for each job.",
    ["controller"],
    registry=REGISTRY,
).labels(CONTROLLER)

_QUEUE = ("name", "controller")
_NAMES = (CONTROLLER, CONTROLLER)
QUEUE_DEPTH = Gauge(
    "workqueue_depth",
    "Jobs that wait for a pass, including jobs whose last pass is in progress.",
    _QUEUE,
    registry=REGISTRY,
).labels(*_NAMES)
QUEUE_ADDS = Counter(
    "workqueue_adds", "Number of times that a job began to wait for a pass.", _QUEUE, registry=REGISTRY
).labels(*_NAMES)
QUEUE_SECONDS = Histogram(
    "workqueue_queue_duration_seconds",
    "Seconds that a job waited for a pass.",
    _QUEUE,
    buckets=_QUEUE_BUCKETS,
    registry=REGISTRY,
).labels(*_NAMES)
WORK_SECONDS = Histogram(
    "workqueue_work_duration_seconds",
    "Duration in seconds of the pass of a job from the queue.",
    _QUEUE,
    buckets=_QUEUE_BUCKETS,
    registry=REGISTRY,
).labels(*_NAMES)
UNFINISHED_SECONDS = Gauge(
    "workqueue_unfinished_work_seconds",
    "Seconds that all passes in progress have taken so far, added up.",
    _QUEUE,
    registry=REGISTRY,
).labels(*_NAMES)
LONGEST_SECONDS = Gauge(
    "workqueue_longest_running_processor_seconds",
    "Seconds that the longest pass in progress has taken so far.",
    _QUEUE,
    registry=REGISTRY,
).labels(*_NAMES)
QUEUE_RETRIES = Counter(
    "workqueue_retries",
    "Passes that raised an error and are retried at increasing intervals.",
    _QUEUE,
    registry=REGISTRY,
).labels(*_NAMES)
RECONCILE_ABORTED = Counter(
    "concertina_reconcile_aborted",
    "Passes that the API server's answer ended early, by the answer. Most are retried at once.",
    ["reason"],
    registry=REGISTRY,
)

# --- the API server, as client-go has it ------------------------------------------------------------------------------

_REQUESTS = Counter(
    "rest_client_requests",
    "Requests to the API server by code, method, host and resource: each attempt and each watch. "
    "The code is <error> if there was no answer.",
    ["code", "method", "host", "resource"],
    registry=REGISTRY,
)
requests = functools.cache(_REQUESTS.labels)
"""Counter of requests by code, method, host and resource."""
_REQUEST_SECONDS = Histogram(
    "rest_client_request_duration_seconds",
    "Seconds from the first attempt of a request to its end, by verb, host and resource, without watches.",
    ["verb", "host", "resource"],
    buckets=_REQUEST_BUCKETS,
    registry=REGISTRY,
)
request_seconds = functools.cache(_REQUEST_SECONDS.labels)
"""Histogram of request durations by verb, host and resource."""
LEADER = Gauge(
    "leader_election_master_status",
    "1 on the operator that holds its release's Lease. The name is always concertina-operator.",
    ["name"],
    registry=REGISTRY,
)
WATCH_RESTARTS = Counter(
    "concertina_watch_restarts",
    "Watches of the API server that ended and were restarted, by resource and reason.",
    ["resource", "reason"],
    registry=REGISTRY,
)
CREATE_REJECTIONS = Counter(
    "concertina_create_rejections",
    "Pods and Secrets that the API server refused, by what must change first.",
    ["kind"],
    registry=REGISTRY,
)

# --- agents -----------------------------------------------------------------------------------------------------------

AGENT_STREAMS = Gauge("concertina_agent_streams", "Streams to agents, by state.", ["state"], registry=REGISTRY)
AGENT_STREAM_ENDS = Counter(
    "concertina_agent_stream_ends",
    "Streams to agents that ended, and failed attempts to open one, by reason.",
    ["reason"],
    registry=REGISTRY,
)
AGENT_CALLS = Counter(
    "concertina_agent_calls",
    "Finished calls to agents, by kind and result.",
    ["kind", "result"],
    registry=REGISTRY,
)
OPERATOR_ISOLATED = Gauge(
    "concertina_operator_isolated",
    "1 while most jobs that have trained are silent. The operator then assumes a fault of its own, and does not "
    "declare replicas lost because of silence.",
    registry=REGISTRY,
)
STALL_SECONDS = Counter(
    "concertina_event_loop_stall_seconds",
    "Seconds in which the process did not run (stopped or without CPU), for pauses of 1 s or more.",
    registry=REGISTRY,
)

# --- traces ---------------------------------------------------------------------------------------------------------

TRACE_SPANS = Counter(
    "concertina_trace_spans",
    "Spans of rounds' traces, by result. All are 0 without a collector.",
    ["result"],
    registry=REGISTRY,
)

# --- jobs, and this process -----------------------------------------------------------------------------------------

JOBS = Gauge(
    "concertina_trainingjobs",
    "TrainingJobs by the value of the column Status. A job without a status counts as Waiting.",
    ["phase"],
    registry=REGISTRY,
)
JOBS_OF_ANOTHER_OPERATOR = Gauge(
    "concertina_jobs_of_another_operator",
    "TrainingJobs that this operator leaves to another one, because it lacks their master key and "
    "the other operator writes their status.",
    registry=REGISTRY,
)
_ROUND_SECONDS = Histogram(
    "concertina_round_duration_seconds",
    "Duration of a round's start by phase: prepare (from its claim to its commit), start (from "
    "the commit to its first progress).",
    ["phase"],
    buckets=_ROUND_BUCKETS,
    registry=REGISTRY,
)
ROUND_PREPARE_SECONDS = _ROUND_SECONDS.labels("prepare")
ROUND_START_SECONDS = _ROUND_SECONDS.labels("start")
BACKGROUND_TASK_RESTARTS = Counter(
    "concertina_background_task_restarts",
    "Background tasks that an unexpected error ended and that were restarted. The log line `part ended` has the error.",
    ["part"],
    registry=REGISTRY,
)
