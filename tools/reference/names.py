"""Reference page of labels, annotations and environment variables."""

from __future__ import annotations

from collections.abc import Mapping

from tools.reference import markdown, sources

from concertina.reproduction import REPRODUCES
from concertina_agent.workers.environment import VARYING

INTRODUCTION = """
Labels and annotations that concertina reads or writes, and the environment variables of its processes. Names that begin
with `concertina.dev/` or `CONCERTINA_` are concertina's own.
"""
JOB_NAMES = {
    "concertina.dev/checkpoint-create": "Annotation. A new value requests a durable checkpoint at the next step. "
    "`concertina checkpoint create` sets it.",
    REPRODUCES: "Annotation. URI of the checkpoint that the job trains again; `concertina reproduce` writes it.",
    "kueue.x-k8s.io/queue-name": "Label that you set: the LocalQueue of the job.",
    "kueue.x-k8s.io/priority-class": "Label that you set: the WorkloadPriorityClass of the job.",
}
POD_NAMES = {
    "concertina.dev/job": "Label. Name of the job, at most 63 characters of it.",
    "concertina.dev/job-uid": "Label. UID of the job.",
    "concertina.dev/replica-index": "Label. Index of the replica.",
    "concertina.dev/attempt": "Label. Number of the pod among the pods of this replica.",
    "concertina.dev/round": "Label, with `launcher: Torchrun` only. Number of the rendezvous.",
    "concertina.dev/avoids": "Annotation. Nodes that the operator excluded for this pod.",
    "concertina.dev/template-hash": "Annotation. Hash of the template that the pod was created from.",
}
OTHER_NAMES = {
    "concertina.dev/trace-id": "Annotation of an event. Id of the OpenTelemetry trace of the round.",
    "concertina.dev/drill-of": "Label of objects that `concertina drill` creates. UID of the job under test.",
    "concertina.dev/evaluates": "Label of the pods of a Job of `spec.evaluationJob`. Name of the TrainingJob.",
    "concertina.dev/slice": "Annotation of a Workload. Number of the Workload among those of the job.",
    "concertina.dev/request-hash": "Annotation of a Workload. Hash of the resources that the job requests.",
    "concertina.dev/job-generation": "Annotation of a Workload. Generation of the job that it was created from.",
    "concertina.dev/shrunk-for": "Annotation of a Workload. Eviction that the job answered with fewer replicas.",
    "concertina.dev/shrunk-at": "Annotation of a Workload. Time of that answer.",
    "concertina.dev/paused": "Annotation of a Workload. `true` if the operator deactivated the Workload itself.",
}
NOT_NAMES = {
    "concertina.dev/operator",  # value of spec.managedBy, and name of the field manager
    "concertina.dev/v1beta1",
}
OPERATOR = {
    "CONCERTINA_NAMESPACE": "Namespace that the operator runs in. Required.",
    "CONCERTINA_MASTER_KEY_SECRET": "Name of the Secret that holds the master key. Required.",
    "CONCERTINA_IMAGE_AGENT": "Image that holds the agent. Required.",
    "CONCERTINA_IMAGE_AGENT_PULL_POLICY": "Pull policy of the image that holds the agent.",
    "CONCERTINA_MASTER_KEY_CREATE": "`true`: the operator creates the Secret if it does not exist.",
    "CONCERTINA_LEASE": "Name of the Lease by which one operator acts at a time.",
    "CONCERTINA_WATCH_NAMESPACES": "Namespaces that are served, separated by commas. Empty: all.",
    "CONCERTINA_NAMESPACE_SELECTOR": "Label selector of the namespaces that are served.",
    "CONCERTINA_WATCH_NODES": "`false`: the operator does not watch nodes.",
    "CONCERTINA_NOTICE_TAINTS": "Taints that announce the end of a node, separated by commas. Absent: the well-known "
    "ones. Empty: none.",
    "CONCERTINA_PREFLIGHT": "`false`: the GPUs are not tested before the replica is ready. `none`: the pod requests no "
    "device, so errors of GPUs are ignored, too.",
    "CONCERTINA_FAULT_CONDITIONS": "Node conditions that say that a node is faulty, separated by commas. Absent: the "
    "well-known ones. Empty: none.",
    "CONCERTINA_HEALTH": "Address of the health endpoint, as HOST:PORT.",
    "CONCERTINA_METRICS": "Address of the metrics endpoint, as HOST:PORT. In a training pod: settings of its metrics, "
    "as JSON.",
    "CONCERTINA_METRICS_ACCESS": "Clients that may read the operator's metrics: `Open`, `Token` or `Review`.",
    "CONCERTINA_METRICS_TOKEN": "Bearer token that clients of the metrics must present, of the operator and of a pod.",
    "CONCERTINA_POD_METRICS": "Port at which agents serve their metrics. Absent or 0: they serve none.",
    "CONCERTINA_POD_METRICS_ANNOTATIONS": "`true`: training pods get the annotations `prometheus.io/...`.",
    "CONCERTINA_POD_METRICS_TOKEN_SECRET": "Name of the Secret with the token for the metrics of a namespace's pods.",
    "CONCERTINA_LOG_LEVEL": "Least severity of what is logged.",
    "CONCERTINA_LOG_FORMAT": "Format of the log.",
}
POD = {
    "CONCERTINA_JOB": "The job, as NAMESPACE/NAME.",
    "CONCERTINA_UID": "UID of the job.",
    "CONCERTINA_REPLICA": "Name of the pod.",
    "CONCERTINA_POD_IP": "Address of the pod.",
    "CONCERTINA_NODE": "Name of the node.",
    "CONCERTINA_PORT": "Port of the agent.",
    "CONCERTINA_WORKERS": "Number of workers in the replica.",
    "CONCERTINA_GRACE_SECONDS": "The pod's termination grace period.",
    "CONCERTINA_IMAGE": "Image of the container `trainer`.",
    "CONCERTINA_TRAINER": "`spec.trainer` as JSON; `{}` for your own command.",
    "CONCERTINA_CHECKPOINT": "`spec.checkpoint` as JSON, or `null`.",
    "CONCERTINA_LEAST_RANKS": "Number of workers of the smallest world that the job allows.",
    "CONCERTINA_SPEC": "The rest of the spec as JSON, without values of variables.",
    "CONCERTINA_WARM_START": "`spec.warmStart` as JSON; `null` for the bundled trainer.",
    "CONCERTINA_TRACKING": "`spec.tracking` as JSON, if the job has one.",
    "CONCERTINA_PARALLELISM": "`spec.parallelism` as JSON, if the job has one.",
    "CONCERTINA_GPU_STAYS": "`1`: workers with GPUs keep their process from round to round, too.",
    "CONCERTINA_STEP_DETECTION": "`false`: optimizer steps are not counted.",
    "CONCERTINA_VOLUME": "Folder of the agent's files.",
    "CONCERTINA_IDENTITY": "Folder of the agent's certificates.",
}
YOURS = {
    "CONCERTINA_DEVICE_BYTES": "Bytes of a device's memory that a worker of the bundled trainer may use. Absent: all.",
    "CONCERTINA_PYTHON": "Path of Python 3.9 or newer in your image, if it is not `python3` on PATH.",
    "CONCERTINA_CACHE": "Folder in which training data from a store are cached.",
    "CONCERTINA_COMMIT": "Commit of your code, which checkpoints record.",
    "CONCERTINA_COMMAND": "Command of your own that was started; trackers record it.",
}
WORKER = {
    "CONCERTINA_ROUND": "Number of the round.",
    "CONCERTINA_SOCKET": "Unix socket of the agent.",
    "CONCERTINA_SNAPSHOTS": "Folder of this round's snapshots.",
    "CONCERTINA_HEARTBEAT": "File in which the worker shows that it is alive.",
    "CONCERTINA_STEP_FILE": "File in which optimizer steps are counted.",
    "CONCERTINA_ENTERED": "Internal: the time at which a process that was forked in advance became a worker.",
    "CONCERTINA_WARM_PARENT": "Internal: connects the worker with the process that has imported its modules.",
    "CONCERTINA_WARM_SOCKET": "Internal: the socket at which an interpreter describes itself to the agent.",
}
EVALUATION_JOB = {
    "CONCERTINA_CHECKPOINT_URI": "Folder of the checkpoint.",
    "CONCERTINA_CHECKPOINT_STEP": "Step of the checkpoint.",
}
MACHINE = {
    "CONCERTINA_LOCAL_CLUSTER": "Marks the processes of a local cluster.",
    "CONCERTINA_OWN_GO": "Internal: a Go toolchain that concertina downloaded is in use.",
    "CONCERTINA_DRILL_": "Prefix of the variables that hold commands of drills (docs/drills.md).",
}


def page() -> str:
    """Return the text of the page.

    Raises:
        ValueError: When the names in the code differ from the names in this module's tables.
    """
    variables = {**OPERATOR, **POD, **YOURS, **WORKER, **EVALUATION_JOB, **MACHINE}
    _compare("variables", sources.constants(r"CONCERTINA_[A-Z_]+"), variables)
    own = {name for name in {**JOB_NAMES, **POD_NAMES, **OTHER_NAMES} if name.startswith("concertina.dev/")}
    _compare("labels and annotations", sources.constants(r"concertina\.dev/[a-z0-9-]+") - NOT_NAMES | {REPRODUCES}, own)
    launchers = ", ".join(f"`{name}`" for name in VARYING if not name.startswith("CONCERTINA_"))
    return markdown.page(
        "Labels, annotations and environment variables",
        INTRODUCTION,
        _section("Labels and annotations of a TrainingJob", JOB_NAMES),
        _section("Labels and annotations of a pod", POD_NAMES),
        _section("Labels and annotations of other objects", OTHER_NAMES),
        "## Variables of a worker",
        markdown.paragraph(f"Each worker has the variables of torchrun, srun and mpirun: {launchers}. And:"),
        markdown.entries(_rows(WORKER)),
        _section("Variables that you may set in the container trainer", YOURS),
        _section("Variables that the operator sets in the container trainer", POD),
        _section("Variables of a Job of spec.evaluationJob", EVALUATION_JOB),
        _section("Variables of the operator, which the chart sets", OPERATOR),
        _section("Variables of the local cluster and of drills", MACHINE),
    )


def _section(title: str, table: Mapping[str, str]) -> str:
    return f"## {title}\n\n{markdown.entries(_rows(table))}"


def _rows(table: Mapping[str, str]) -> list[tuple[str, str]]:
    return [(markdown.code(name), markdown.safe(text)) for name, text in table.items()]


def _compare(what: str, in_code: set[str], in_tables: Mapping[str, str] | set[str]) -> None:
    missing, gone = sorted(in_code - set(in_tables)), sorted(set(in_tables) - in_code)
    if missing or gone:
        raise ValueError(f"tools/reference/names.py: {what} to add: {missing}; to remove: {gone}")
