"""Table of the drills: for each drill, its fault and how the job must recover."""

from __future__ import annotations

from dataclasses import dataclass, replace

from concertina.drill.faults import api_server, by_object, in_container, local_cluster, tenants
from concertina.drill.faults.by_command import ByCommand
from concertina.drill.target import OUTAGE, STANDSTILL, DrillTarget, Fault, ProgressSource
from concertina.drill.verdict import Expect
from concertina.terminal.cluster_connection import UserError


@dataclass(frozen=True)
class Scenario:
    """A drill: its fault, and the expectations that the job must meet.

    `local` is the fault on a local cluster, and `elsewhere` the fault on other clusters. If a fault can't be injected
    there, the field is a sentence with the reason.
    """

    about: str
    local: Fault | str
    elsewhere: Fault | str
    expect: Expect

    def fault(self, target: DrillTarget) -> Fault:
        """Return the fault for the cluster on which the job runs.

        Raises:
            UserError: When the fault can't be injected on this cluster.
        """
        fault = self.local if target.local else self.elsewhere
        if isinstance(fault, str):
            raise UserError(fault)
        if isinstance(fault, ByCommand):
            fault.commands()
        return fault


CRASH = Expect(seconds=30.0, counted=True)
LOST_NODE = Expect(seconds=30.0, counted=False)
UNTOUCHED = Expect(seconds=60.0, new_round=False, replayed=0, counted=False)

SCENARIOS: dict[str, Scenario] = {
    "kill-worker": Scenario(
        "a training process is killed", api_server.kill_worker, api_server.kill_worker, CRASH,
    ),
    "kill-coordinator": Scenario(
        "the agent of the coordinator is killed (on a cluster that is not local: its pod)",
        local_cluster.kill_coordinator, api_server.kill_coordinator_pod, Expect(seconds=30.0),
    ),
    "kill-node": Scenario(
        "a node loses power, and its peers see closed connections",
        local_cluster.kill_node,
        ByCommand("NODE_KILL", "NODE_UP", "killed node {node}"), LOST_NODE,
    ),
    "stop-node": Scenario(
        "a node freezes, and later continues",
        local_cluster.stop_node,
        ByCommand("NODE_STOP", "NODE_CONTINUE", "silenced node {node}"), LOST_NODE,
    ),
    "partition": Scenario(
        "a node is disconnected while its processes run on, and later it is reconnected: what they did in the "
        "meantime is discarded",
        "The nodes of the local cluster share one network, so none can be disconnected. The nearest drill is "
        "`stop-node`. On real kubelets, `make test-e2e` runs this drill.",
        ByCommand("NODE_ISOLATE", "NODE_REJOIN", "cut off node {node}"), LOST_NODE,
    ),
    "notice": Scenario(
        "a pod is evicted, as by `kubectl drain`; no step is lost",
        api_server.evict, api_server.evict, Expect(seconds=60.0, replayed=0, counted=False),
    ),
    "faulty-node": Scenario(
        "a node gets a condition for a fault, as node-problem-detector sets it; the replica moves, and no step is lost",
        api_server.report_faulty_node, api_server.report_faulty_node,
        Expect(seconds=60.0, replayed=0, counted=False, reasons=("HardwareFault", "ReplicaLeaving")),
    ),
    "oom": Scenario(
        "a worker's container runs out of memory, and the kernel kills the worker",
        "The containers of the local cluster have no memory limit, and a SIGKILL alone is not an out-of-memory "
        "kill. On real kubelets, `make test-e2e` runs this drill.",
        in_container.out_of_memory, Expect(seconds=30.0, counted=True, reasons=("OutOfMemory",)),
    ),
    "hang": Scenario(
        "a worker hangs, and its connections stay open",
        api_server.hang, api_server.hang, Expect(seconds=120.0, counted=True, reasons=("WorkerStopped", "Hang")),
    ),
    "straggle": Scenario(
        "a worker is slow (it is stopped for moments whenever it computes), and the other workers wait for it "
        "in every step",
        in_container.straggle, in_container.straggle,
        Expect(seconds=100.0, new_round=None, replayed=0, counted=False, named=True),
    ),
    "operator-kill": Scenario(
        "the operator is killed; the job must not be affected",
        local_cluster.kill_operator, api_server.delete_operator, UNTOUCHED,
    ),
    "operator-stop": Scenario(
        f"the operator is frozen for {STANDSTILL:g} s and then continues; the job must not be affected",
        local_cluster.stop_operator,
        ByCommand(
            "OPERATOR_STOP", "OPERATOR_CONTINUE", "stopped the operator {operator}", ProgressSource.LOGS, STANDSTILL
        ),
        UNTOUCHED,
    ),
    "operator-partition": Scenario(
        "the operator reaches only the API server and no agent of the job; the job must not be affected, and "
        "its status must say so",
        "The nodes of the local cluster share one network, so an operator can't be cut off. The nearest drill "
        "is `operator-stop`. On real kubelets, `make test-e2e` runs this drill.",
        by_object.part_operator, replace(UNTOUCHED, told=("AgentsUnreachable",)),
    ),
    "refused-pods": Scenario(
        "a pod is killed while a broken webhook blocks new pods; the remaining replicas continue, and the pod "
        "is replaced later",
        by_object.refuse_pods, by_object.refuse_pods,
        Expect(seconds=30.0, counted=False, told=("PodRefused", by_object.HOOK)),
    ),
    "hostile-agent": Scenario(
        "a worker is killed while a pod of another namespace floods the operator, in a namespace that the drill "
        "creates",
        tenants.hostile_agent, tenants.hostile_agent, CRASH,
    ),
    "long-queue": Scenario(
        "a worker is killed while many jobs wait for room, in namespaces that the drill creates",
        tenants.long_queue, tenants.long_queue, CRASH,
    ),
    "apiserver-restart": Scenario(
        f"the API server is killed and started again {OUTAGE:g} s later; the job must not be affected",
        local_cluster.kill_apiserver,
        ByCommand("APISERVER_STOP", "APISERVER_START", "stopped the API server", ProgressSource.NOTHING, OUTAGE),
        UNTOUCHED,
    ),
    "storage-outage": Scenario(
        f"durable storage is unavailable for {OUTAGE:g} s; training continues, and a checkpoint follows",
        local_cluster.kill_storage,
        ByCommand("STORAGE_STOP", "STORAGE_START", "stopped the storage", seconds=OUTAGE),
        Expect(seconds=60.0, new_round=False, replayed=0, counted=False, checkpoint=True),
    ),
}  # fmt: skip
